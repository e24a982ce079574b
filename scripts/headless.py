"""Workflows without the editor: convert them to the form that ComfyUI's API takes, or queue them on a running server.

``.venv/bin/python scripts/headless.py api workflows/quickstart.json --out quickstart.api.json`` asks a server for its
nodes' inputs: the one at ``--server``, or one that is started for a moment. ``… run quickstart.json --server URL``
queues a workflow in either form, shows progress and prints the SHA-256 of each render's latents.
"""

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from comfy_client import Client, RunError, load_workflow, run_file
from comfy_host import HostError, Server, provisioned


@contextlib.contextmanager
def server_url(url: str | None) -> Iterator[str]:
    """Give a server's address; without one, start ComfyUI on a free port and stop it after."""
    if url is not None:
        yield url.rstrip("/")
        return
    host = provisioned()
    if host is None:
        raise HostError("no ComfyUI here; run python3 scripts/comfy_host.py provision, or use --server URL")
    with tempfile.TemporaryDirectory() as folder, Server(host=host, cpu=True, data=Path(folder)) as server:
        yield server.url


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="headless", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("api", "write the form that /prompt takes"), ("run", "queue it and wait")):
        command = commands.add_parser(name, help=text)
        command.add_argument("workflow", type=Path, help="a workflow as the editor saves it")
        command.add_argument("--server", metavar="URL", required=name == "run", help="such as http://127.0.0.1:8188")
        command.add_argument("--prompt", help="the text to use in place of the workflow's")
        command.add_argument("--seed", type=int, help="the seed to use in place of the workflow's")
        if name == "api":
            command.add_argument("--out", type=Path, metavar="FILE", help="where to write; without, it is printed")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, or 1 for a failure or a workflow that was refused in part."""
    options = _parse(arguments)
    try:
        with server_url(options.server) as url:
            if options.command == "run":
                return run_file(url, options.workflow, prompt=options.prompt, seed=options.seed)
            api, _ = load_workflow(Client(url), options.workflow, prompt=options.prompt, seed=options.seed)
        text = json.dumps(api, indent=1, ensure_ascii=False) + "\n"
        if options.out is None:
            print(text, end="")
        else:
            options.out.write_text(text, encoding="utf-8")
    except (HostError, RunError, OSError) as error:
        print(f"headless: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
