#!/usr/bin/env bash
# Trains the embedded model on every CUDA device of this machine, within a time limit per step, continuing from the shipped
# weights: bash scripts/train_embedded.sh OUT [VAE_S BASE_S SFT_S DISTILL_S]. Steps that are done are skipped when it runs again.
# VAE_S 0 keeps the shipped autoencoder and only measures it. The model is left in OUT/assets and, with DISTILL_S above 0,
# distilled in OUT/distilled, from a teacher that is trained for BASE_S too; reports and log in OUT.
set -euo pipefail
case "${1:-}" in
"" | -*) echo "usage: train_embedded.sh OUT [VAE_S BASE_S SFT_S DISTILL_S]" >&2 && exit 2 ;;
esac
out="$(mkdir -p "$1" && cd "$1" && pwd)"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
vae_s="${2:-240}" base_s="${3:-250}" sft_s="${4:-600}" distill_s="${5:-0}"
python="${PYTHON:-python3}"
gpus="$("$python" -c 'import torch; print(max(1, torch.cuda.device_count()))')"

train() {
    local step="$1" seconds="$2"
    shift 2
    [ -e "$out/$step.done" ] && return
    "$python" -m torch.distributed.run --standalone --nproc-per-node "$gpus" -m flashforward_core train "${step#teacher_}" \
        --out "$out" --steps 1000000 --max-s "$seconds" "$@" 2>&1 | tee -a "$out/train.log"
    touch "$out/$step.done"
}

if [ "$vae_s" = 0 ]; then
    train vae 1 --init flashforward_core/assets/vae --steps 0
else
    train vae "$vae_s" --init flashforward_core/assets/vae --scenes 1536
fi
train base "$base_s" --init flashforward_core/assets --scenes 2048
train sft "$sft_s" --scenes 2048
echo "trained: $out/assets"
[ "$distill_s" = 0 ] && exit
train teacher_base "$base_s" --out "$out/teacher" --init "$out/assets" --rebase 0.7 --lr 5e-4 --scenes 2048
train distill "$distill_s" --teacher "$out/teacher/base.pt"
echo "distilled: $out/distilled"
