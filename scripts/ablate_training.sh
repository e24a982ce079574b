#!/usr/bin/env bash
# What the parts of packed fine-tuning add, at small scale: four short trainings from the same weights with the same number of
# steps, each measured on held-out captions: bash scripts/ablate_training.sh OUT [STEPS]. Rows are left in OUT/ablation_ROW.json,
# comparisons with the first row in OUT/ablation.txt.
#   roles_shared: both roles in one set of weights    rebased: with time-rebase    full: with role embedding and LoRAs too
#   roles: with role embedding and LoRAs, without time-rebase
# ROWS: some of them, the first included ("roles_shared rebased roles full").
# All train on clips of 41 latents out of 81, so that there is room for time-rebase.
set -euo pipefail
case "${1:-}" in
"" | -*) echo "usage: ablate_training.sh OUT [STEPS]" >&2 && exit 2 ;;
esac
out="$(mkdir -p "$1" && cd "$1" && pwd)"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
steps="${2:-120}"
python="${PYTHON:-python3}"
assets=flashforward_core/assets
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

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

rows="${ROWS:-roles_shared rebased roles full}"
for name in $rows; do
    case "$name" in
    roles_shared) row "$name" --rank 0 --no-role-embedding ;;
    rebased) row "$name" --rank 0 --no-role-embedding --rebase 0.5 ;;
    roles) row "$name" ;;
    full) row "$name" --rebase 0.5 ;;
    *) echo "row $name is unknown; use roles_shared, rebased, roles or full" >&2 && exit 2 ;;
    esac
done
for name in $rows; do
    [ "$name" = roles_shared ] && continue
    echo "roles_shared -> $name"
    "$python" -m flashforward_core bench quality --from "$out/ablation_$name.json" --against "$out/ablation_roles_shared.json"
done | tee "$out/ablation.txt"
