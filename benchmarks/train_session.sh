#!/usr/bin/env bash
# Trains on one GPU within a time limit, each step with seconds of its own, and leaves what each step gave at once:
#   bash benchmarks/train_session.sh OUT [SECONDS]
# OUT gets at most eight files of at most 14 MiB; SECONDS is the limit for all (570). PART chooses:
#   distill (default)  quality of the shipped model, a training of the base as teacher, distillation with what is left of the
#                      time (about 70 s of 570), quality after it: before.json, after.json, comparison.txt, and the new model
#                      in parts. Rates and guidance are those that made the shipped model, in 360 and 400 s.
#   ablate             scripts/ablate_training.sh: ablation_*.json, ablation.txt
#   vae                the decoder, on crops around sprites and whole clips: vae_before.json, vae_after.json, the autoencoder
#   sizes              seconds and memory of a step with 14B's LoRAs on frozen weights: sizes.json
# A model in parts is a folder like flashforward_core/assets: cat OUT/distilled.tar.* | tar -x, then bench quality --assets distilled.
# TESTS: GPU tests to run first, as pytest's -k (none). PYTHON chooses the interpreter; COMMIT what rows say was measured.
# BEFORE_S, BASE_S, DISTILL_S, AFTER_S and VAE_S are the steps' seconds; QUALITY, BASE, DISTILL, VAE and SIZES are options that
# are added to what is written here and go first, such as QUALITY="--variants flashforward,self_forcing,hiar" (8 s more, twice).
# ABLATE_STEPS: steps of each row; MEASURED: clips that measure the autoencoder.
set -uo pipefail
case "${1:-}" in
"" | -*) echo "usage: train_session.sh OUT [SECONDS]" >&2 && exit 2 ;;
esac
out="$(mkdir -p "$1" && cd "$1" && pwd)" || exit 1
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
limit="${2:-570}"
python="${PYTHON:-python3}"
assets=flashforward_core/assets
commit="${COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec > >(tee -a "$out/log.txt") 2>&1

# guarded NAME SECONDS COMMAND...: runs a command for at most so long, and no longer than the session lasts but for 15 s. It
# is interrupted first, and killed ten seconds later.
guarded() {
    local name="$1" most="$2" began=$SECONDS left=$((limit - SECONDS - 15)) status
    shift 2
    [ "$most" -gt "$left" ] && most="$left"
    if [ "$most" -lt 5 ]; then
        echo "FAILED $name: no time left"
        return 1
    fi
    echo "== $name (at most $most s)"
    timeout --signal=INT --kill-after=10 "$most" "$@"
    status=$?
    [ "$status" -ne 0 ] && echo "FAILED $name: status $status"
    echo "== $name: status $status after $((SECONDS - began)) s"
    return "$status"
}

core() { # NAME SECONDS ARGUMENTS...
    guarded "$1" "$2" "$python" -m flashforward_core "${@:3}"
}

quality() { # NAME SECONDS ARGUMENTS...: what a stopped run has measured stays
    core "quality $1" "$2" bench quality --json "$out/$1.json" --variants flashforward --latents 81 \
        --commit "$commit" ${QUALITY:-} "${@:3}"
}

pack() { # NAME FOLDER: leaves the folder in parts that stay below a limit of 15 MiB
    [ -d "$2" ] || return
    tar -C "$(dirname "$2")" -c "$(basename "$2")" | split -b 14M - "$out/$1.tar."
}

distill() {
    quality before "${BEFORE_S:-45}"
    core "base" "$((${BASE_S:-330} + 100))" train base --out "$work" --init "$assets" --scenes 768 --steps 100000 \
        --max-s "${BASE_S:-330}" --lr 5e-4 --rebase 0.7 --no-compile ${BASE:-}
    local teacher="$work/base.pt" after="${AFTER_S:-45}"
    [ -e "$teacher" ] || teacher="$assets"
    # 15 s are guarded's own; 45 go into loading, the last 20 steps, between which nobody looks at the clock, and the export
    local seconds="${DISTILL_S:-$((limit - SECONDS - after - 15 - 45))}"
    core "distill from $(basename "$teacher")" "$((seconds + 45))" train distill --out "$work" --init "$assets" \
        --teacher "$teacher" --scenes 4096 --steps 100000 --max-s "$seconds" \
        --save-every-s 60 --no-compile ${DISTILL:-}
    pack distilled "$work/distilled"
    quality after "$after" --assets "$work/distilled"
    "$python" -m flashforward_core bench quality --from "$out/after.json" --against "$out/before.json" |
        tee "$out/comparison.txt"
}

measure_vae() { # NAME: of what lies in the work folder
    [ -e "$work/vae_report.json" ] && mv "$work/vae_report.json" "$out/vae_$1.json"
}

vae() {
    core "shipped autoencoder" 100 train vae --out "$work" --init "$assets/vae" --steps 0 --held-out "${MEASURED:-128}"
    measure_vae before
    core "decoder" "$((${VAE_S:-270} + 150))" train vae --out "$work" --init "$assets/vae" --decoder-only \
        --scenes 1024 --steps 100000 --max-s "${VAE_S:-270}" --held-out "${MEASURED:-128}" ${VAE:-}
    pack vae "$work/vae"
    measure_vae after
}

sizes() {
    local each="bench train --model 14B --frozen --rank 128 --json $out/sizes.json --commit $commit"
    core "14B packed" 250 $each --phases sft --latents 31 ${SIZES:-}
    core "14B distillation" 400 $each --phases critic student --latents 21 ${SIZES:-}
}

ablate() { guarded "ablation" "$limit" bash scripts/ablate_training.sh "$out" "${ABLATE_STEPS:-90}"; }

"$python" -c 'import torch; print(torch.__version__, torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU")'
[ -n "${TESTS:-}" ] && guarded "tests" 120 "$python" -m pytest -q --tb=line -p no:cacheprovider tests/gpu -k "$TESTS"
part="${PART:-distill}"
case "$part" in
distill | ablate | vae | sizes) "$part" ;;
*) echo "FAILED $part: no such part; use distill, ablate, vae or sizes" ;;
esac
echo "== done after $SECONDS s of $limit; failures:"
grep '^FAILED' "$out/log.txt" | sort -u || echo none
