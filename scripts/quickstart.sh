#!/usr/bin/env bash
# Make a video with one command: sets everything up, runs a workflow in ComfyUI, prints the mp4's path last.
#   bash scripts/quickstart.sh [workflow.json] [--prompt TEXT] [--seed N] [--serve] [--port N] [--cpu]
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
. "$here/find_python.sh"
python="$(find_python)"
exec "$python" "$here/comfy_host.py" run "$@"
