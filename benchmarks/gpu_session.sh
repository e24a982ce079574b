#!/usr/bin/env bash
# Tests and measures everything that needs GPUs, within a time limit; every part has its own, so that one failure loses
# nothing else. Rows and logs go to OUT as they come.
#   bash benchmarks/gpu_session.sh OUT [SECONDS] [WHEELS]
# OUT: folder for rows.json, log.txt, traces. SECONDS: limit for all (540). WHEELS: folder of wheels that are installed
# for this run only, such as fa3-fwd. PYTHON chooses the interpreter; PARTS the parts, in order.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out="$(mkdir -p "${1:?where to write}" && cd "$1" && pwd)"
limit="${2:-540}"
wheels="${3:-}"
python="${PYTHON:-python3}"
parts="${PARTS:-tests sdpa fa3 job lanes large fp8 decode small tests_async}"
gpus="$("$python" -c 'import torch; print(torch.cuda.device_count())')"
one=cuda:0
both="$one"
[ "$gpus" -gt 1 ] && both=cuda:0,cuda:1
libraries="$(mktemp -d)"
trap 'rm -rf "$libraries"' EXIT
export PYTHONPATH="$libraries:$PWD${PYTHONPATH:+:$PYTHONPATH}" XDG_CACHE_HOME="$out/cache" PYTHONUNBUFFERED=1
exec > >(tee -a "$out/log.txt") 2>&1

left() { echo $((limit - SECONDS)); }

# guarded NAME SECONDS COMMAND...: runs a command for at most so long, and no longer than the session lasts
guarded() {
    local name="$1" most="$2" began=$SECONDS status
    shift 2
    [ "$most" -gt "$(left)" ] && most="$(left)"
    if [ "$most" -lt 10 ]; then
        echo "== $name: no time left"
        return
    fi
    echo "== $name (at most $most s)"
    timeout --kill-after=10 "$most" "$@"
    status=$?
    echo "== $name: status $status after $((SECONDS - began)) s"
}

bench() {
    local name="$1" most="$2"
    shift 2
    guarded "$name" "$most" "$python" -m flashforward_core bench latency --json "$out/rows.json" --traces "$out/traces" "$@"
}

large_model() { bench "$1" "$2" --model "$3" --resolution 480p --precision "${4:-bf16}" "${@:5}"; }

part() {
    case "$1" in
    tests) guarded tests 150 "$python" -m pytest -q -p no:cacheprovider tests/gpu ;;
    tests_async)
        PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync PYTORCH_ALLOC_CONF=backend:cudaMallocAsync \
            guarded "tests with cudaMallocAsync" 120 "$python" -m pytest -q -p no:cacheprovider tests/gpu
        ;;
    small) bench embedded 60 --model embedded --precision fp32 --latents 81 --devices $one --metrics rollout_s job_s ;;
    sdpa) # forwards, whole rollouts of every schedule on one GPU (5 and 20 s), and every layout on two
        large_model "1.3B cudnn, one GPU" 170 1.3B bf16 --attention cudnn --latents 21 81 --devices $one \
            --metrics forward_ms forward_error rollout_s --schedules flashforward self_forcing hiar --predict 2 4
        [ "$gpus" -gt 1 ] && large_model "1.3B cudnn, two GPUs" 100 1.3B bf16 --attention cudnn --latents 81 \
            --devices $both --metrics rollout_s --layouts interleaved prelude streaming --predict 4
        ;;
    fa3)
        large_model "1.3B fa3" 100 1.3B bf16 --attention fa3 --latents 81 --devices $one $([ "$gpus" -gt 1 ] && echo $both) \
            --metrics forward_ms rollout_s --predict 4
        ;;
    decode) # each way to decode; the fit that predictions use
        large_model "1.3B decoding" 150 1.3B bf16 --latents 81 --devices $one --metrics forward_ms decode_fps --fit
        ;;
    fp8) large_model "1.3B fp8" 80 1.3B fp8 --latents 27 --devices $one --metrics forward_ms ;;
    large)
        large_model "14B" 100 14B bf16 --latents 27 --devices $one --metrics forward_ms
        large_model "14B fp8" 100 14B fp8 --latents 27 --devices $one --metrics forward_ms
        ;;
    job) # one lane denoises, the other decodes
        large_model "1.3B job" 120 1.3B bf16 --latents 81 --devices $both --decode "$([ "$gpus" -gt 1 ] && echo own || echo shared)" \
            --metrics job_s
        ;;
    lanes) [ "$gpus" -gt 1 ] && large_model "1.3B lane scaling" 60 1.3B bf16 --latents 42 --devices $both --metrics lane_scaling ;;
    *) echo "== $1: no such part" ;;
    esac
}

if [ -n "$wheels" ]; then
    guarded "install wheels" 60 "$python" -m pip install --quiet --no-deps --no-index --target "$libraries" "$wheels"/*.whl
fi
"$python" -c 'import torch; print(torch.__version__, [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())])'
for name in $parts; do part "$name"; done
echo "== done after $SECONDS s of $limit"
