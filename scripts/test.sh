#!/usr/bin/env bash
# Sets up and checks everything that needs no GPU; two runs of pytest side by side, the last line is a summary.
# Arguments go to pytest: bash scripts/test.sh tests/unit
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/find_python.sh
python="$(find_python)"
say() { echo "== $*"; }

have_chromium() { command -v chromium || command -v chromium-browser || command -v google-chrome; }

prepare_browser() {
    if ! command -v npm >/dev/null; then
        say "browser tests will be skipped: no npm"
        return
    fi
    if ! have_chromium >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing chromium"
        { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } >/dev/null 2>&1 || true
    fi
    if ! have_chromium >/dev/null; then
        say "browser tests will be skipped: no chromium"
        return
    fi
    npm ci --prefix tests/browser --no-audit --no-fund --silent || say "browser tests will be skipped: npm ci failed"
}

say "set-up"
"$python" scripts/comfy_host.py provision --dev
prepare_browser

say "format, lint, types, arrows"
.venv/bin/ruff format --check --quiet .
.venv/bin/ruff check --quiet .
.venv/bin/mypy
.venv/bin/lint-imports

if command -v node >/dev/null; then
    say "the page's code"
    node --test --test-reporter=dot tests/web/*.test.mjs
else
    say "the page's code is not tested: no node"
fi

say "simulate, with the system's Python"
"$python" -m flashforward_core simulate --latent-frames 81 --devices 4 --json

say "mutants: planted defects that a test must notice"
.venv/bin/python scripts/mutants.py

say "tests"
export OMP_NUM_THREADS=1  # with more, sums of other shapes may round otherwise, and shared cores are far slower
export HYPOTHESIS_PROFILE="${HYPOTHESIS_PROFILE:-gate}"  # "default" looks for examples never tried
run_tests() { .venv/bin/python -m pytest -q -m "not gpu" "$@"; }

if [ $# -gt 0 ]; then
    run_tests "$@"
    exit
fi

# Those that start servers beside those that compute or start clusters: one waits while the other works.
started=(tests/browser tests/nodes)
mkdir -p .out
run_tests tests "${started[@]/#/--ignore=}" -p no:cacheprovider >.out/tests.log 2>&1 &
computing=$!
trap 'kill "$computing" 2>/dev/null || true' EXIT
failed=0
run_tests "${started[@]}" || failed=$?
wait "$computing" || failed=$?
cat .out/tests.log
exit "$failed"
