"""A real ComfyUI server for each file of browser tests."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

from comfy_host import Server, provisioned

from ..nodes.standins import write_models


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    host = provisioned()
    if host is None:
        pytest.skip("no ComfyUI here; run: python3 scripts/comfy_host.py provision --dev")
    extra = ["--extra-model-paths-config", str(write_models(tmp_path_factory.mktemp("models")))]
    with Server(host=host, cpu=True, data=tmp_path_factory.mktemp("comfyui"), extra=extra) as running:
        yield running
