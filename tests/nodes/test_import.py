"""The pack starts with the server, quietly."""

import subprocess
from pathlib import Path

import pytest
from comfy_host import Host, Server

pytestmark = pytest.mark.cpu

IMPORT = """
import sys
sys.argv = ["main.py", "--cpu"]
import comfy.options
comfy.options.enable_args_parsing()
import utils.install_util, server, nodes, importlib.util  # what ComfyUI has imported when it comes to the packs
import torch, contextlib, io, warnings
said = io.StringIO()
with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), warnings.catch_warnings():
    warnings.simplefilter("error")
    spec = importlib.util.spec_from_file_location("pack", sys.stdin.read().strip() + "/__init__.py")
    pack = importlib.util.module_from_spec(spec)
    sys.modules["pack"] = pack
    spec.loader.exec_module(pack)
    import asyncio
    names = asyncio.run(asyncio.run(pack.comfy_entrypoint()).get_node_list())
assert len(names) >= 7, names
assert said.getvalue() == "", said.getvalue()
assert not torch.cuda.is_initialized()
assert not hasattr(pack, "NODE_CLASS_MAPPINGS")  # ComfyUI would ignore the entry point
assert "diffusers" not in sys.modules, "importing the pack loads diffusers, which takes seconds"
assert nodes is sys.modules["nodes"] and hasattr(nodes, "KSampler")
"""


def test_importing_the_pack_is_silent_and_touches_no_gpu(host: Host) -> None:
    done = subprocess.run(
        [str(host.python), "-c", IMPORT],
        cwd=host.comfy,
        input=str(host.root),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_server_starts_with_the_pack_loaded(host: Host, tmp_path: Path) -> None:
    server = Server(host=host, cpu=True, data=tmp_path, port=1, extra=["--quick-test-for-ci"])
    server.make_folders()
    done = subprocess.run(server.command(), cwd=host.comfy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = (done.stdout + done.stderr).splitlines()
    (timing,) = [line for line in lines if "seconds" in line and line.endswith("ComfyUI-FlashForward")]
    assert "IMPORT FAILED" not in timing
