"""Claims about the host script that need no ComfyUI."""

import socket
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))

from comfy_host import Host, HostError, Server, free_port, main, open_line  # noqa: E402

pytestmark = pytest.mark.cpu


def server(root: Path, port: int) -> Server:
    return Server(host=Host(root=root, comfy=root, python=Path(sys.executable)), port=port, data=root)


def test_a_busy_port_is_refused_in_one_line_and_the_log_stays(tmp_path: Path) -> None:
    (tmp_path / "server.log").write_text("another server's")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(HostError, match=f"port={port} is in use by another server; .* use --port 0") as caught:
            server(tmp_path, port).__enter__()
    assert "\n" not in str(caught.value)
    assert (tmp_path / "server.log").read_text() == "another server's"


@pytest.mark.parametrize("port", [-1, 65536, 10**12])
def test_a_port_that_cannot_be_is_refused(tmp_path: Path, port: int) -> None:
    with pytest.raises(HostError, match=f"port={port} is outside 1 to 65535"):
        server(tmp_path, port).__enter__()


def test_a_free_port_is_tried(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="ComfyUI ended while starting"):  # there is no main.py
        server(tmp_path, free_port()).__enter__()


def test_the_open_editor_says_where_the_workflow_is() -> None:
    assert open_line("http://x", None) == "the editor is open at http://x (Ctrl-C ends it)"
    assert "http://x/?template=quickstart&source=ComfyUI-FlashForward " in open_line(
        "http://x", ROOT / "workflows" / "quickstart.json"
    )
    assert "open the workflow that ran, mine.json" in open_line("http://x", Path("mine.json"))


@pytest.mark.parametrize("text", [None, "# Words", "[1]", "[" * 100_000])
def test_what_is_no_workflow_is_refused_before_set_up(
    text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")  # set-up could not even start
    file = tmp_path / "odd.json"
    if text is not None:
        file.write_text(text)
    assert main(["run", str(file)]) == 1
    told = capsys.readouterr()
    assert f"cannot read the workflow {file}" in told.out + told.err
    assert "that the editor saved" in told.out + told.err
