#!/usr/bin/env bash
# What the parts of packed fine-tuning add, at small scale: three short trainings from the same weights with the same number of
# steps, each measured on held-out captions: bash scripts/ablate_training.sh OUT [STEPS]. Rows are left in OUT/ablation_ROW.json,
# comparisons with the first row in OUT/ablation.txt.
#   roles_shared: both roles in one set of weights    rebased: with time-rebase    full: with role embedding and LoRAs too
# All train on clips of 41 latents out of 81, so that there is room for time-rebase.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out="${1:?usage: ablate_training.sh OUT [STEPS]}"
steps="${2:-120}"
python="${PYTHON:-python3}"
assets=flashforward_core/assets
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"

row() {
    local name="$1"
    shift
    mkdir -p "$work/$name" "$work/latents"
    ln -sfn "$work/latents" "$work/$name/latents"
    "$python" -m flashforward_core train sft --out "$work/$name" --init $assets --scenes "${SCENES:-256}" --latents 41 \
        --steps "$steps" --clips "${CLIPS:-8}" --no-compile "$@"
    "$python" -m flashforward_core bench quality --assets "$work/$name/assets" --variants flashforward --latents 41 \
        --captions "${CAPTIONS:-32}" --json "$out/ablation_$name.json" --commit "${COMMIT:-}"
}

row roles_shared --rank 0 --no-role-embedding
row rebased --rank 0 --no-role-embedding --rebase 0.5
row full --rebase 0.5
for name in rebased full; do
    echo "roles_shared -> $name"
    "$python" -m flashforward_core bench quality --from "$out/ablation_$name.json" --against "$out/ablation_roles_shared.json"
done | tee "$out/ablation.txt"
