"""Talk to a running ComfyUI over HTTP: queue a workflow, follow its progress, find what it wrote."""

import json
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from comfy_workflow import Json, WorkflowError, is_editor_format, to_api, with_overrides

POLL_S = 0.25
VIDEO_SUFFIXES = (".mp4", ".webm", ".mkv")


class RunError(RuntimeError):
    """A workflow that was refused or failed, in the server's words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a finished run left in the server's history."""

    prompt_id: str
    outputs: Json
    """Per node id, what the node shows."""
    status: Json
    refused: tuple[str, ...] = ()
    """Why the server left some outputs out, a line per node whose values do not fit, and last, which outputs."""

    def files(self, output: Path) -> list[Path]:
        """List the files that were saved, given the server's output folder."""
        entries = [entry for shown in self.outputs.values() for entry in shown.get("images", [])]
        return [output / entry["subfolder"] / entry["filename"] for entry in entries if entry["type"] == "output"]

    def texts(self) -> list[str]:
        """List the lines of text that nodes show."""
        return [text for shown in self.outputs.values() for text in shown.get("text", [])]

    def sha256(self) -> list[str]:
        """List the SHA-256 of every render's latents."""
        return [digest for shown in self.outputs.values() for digest in shown.get("sha256", [])]

    def sha256_lines(self, prompt: Json) -> list[str]:
        """List the same with the node that each comes from, as lines for people."""
        return [
            f"latents sha256 {digest}  {node_name(node_id, prompt)}"
            for node_id, shown in self.outputs.items()
            for digest in shown.get("sha256", [])
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """What the server said to a prompt that it took."""

    prompt_id: str
    refused: tuple[str, ...]
    """See ``Result``."""


Progress = Callable[[str, int, int], None]
"""Called with node id, steps done and steps in all."""

Preview = Callable[[bytes], None]
"""Called with each preview's encoded image."""

Refusal = Callable[[tuple[str, ...]], None]
"""Called with ``Result.refused``, before the rest runs."""
SHOWS_PICTURES = {"supports_preview_metadata": False}  # but plain previews
PREVIEW_EVENT = (1).to_bytes(4, "big")  # the websocket's mark of a preview image; 4 bytes of image type follow


@dataclass(frozen=True, slots=True)
class Client:
    """One server."""

    url: str
    client_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def request(self, path: str, body: Json | None = None) -> Any:
        """GET ``path``, or POST ``body`` to it; a refusal raises ``RunError`` with the server's reasons."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers), timeout=60) as answer:
                content = answer.read()
        except urllib.error.HTTPError as error:
            raise RunError(_reasons(error.read().decode(errors="replace"), body)) from error
        return json.loads(content) if content.strip() else None

    def object_info(self) -> dict[str, Json]:
        """Fetch every node's schema."""
        return self.request("/object_info")  # type: ignore[no-any-return]

    def queue(self, prompt: Json, *, workflow: Json | None = None, on_refused: Refusal | None = None) -> Queued:
        """Queue the server's form of a workflow; the editor's form goes along as metadata.

        Of a workflow with several outputs the server takes those that are valid: ``Queued.refused`` says what is
        missing. If none is, it raises ``RunError``.
        """
        body: Json = {"prompt": prompt, "client_id": self.client_id}
        if workflow is not None:
            body["extra_data"] = {"extra_pnginfo": {"workflow": workflow}}
        answer = self.request("/prompt", body)
        refused = _refused(answer.get("node_errors") or {}, prompt)
        if refused and on_refused is not None:
            on_refused(refused)
        return Queued(prompt_id=answer["prompt_id"], refused=refused)

    def interrupt(self) -> None:
        """Stop what is running."""
        self.request("/interrupt", {})

    def finished(self, prompt_id: str) -> Result | None:
        """Return the run's result, or None while it is queued or running."""
        entry = self.request(f"/history/{prompt_id}").get(prompt_id)
        if entry is None or not entry.get("status"):
            return None
        return Result(prompt_id=prompt_id, outputs=entry["outputs"], status=entry["status"])

    def wait(self, prompt_id: str, *, timeout_s: float = 600.0) -> Result:
        """Poll until the run is over, however it ended."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            result = self.finished(prompt_id)
            if result is not None:
                return result
            time.sleep(POLL_S)
        raise RunError(f"the run took longer than {timeout_s:.0f} s")

    async def _follow(
        self,
        prompt: Json,
        workflow: Json | None,
        on_progress: Progress,
        on_preview: Preview | None,
        on_refused: Refusal | None,
    ) -> Queued:
        import aiohttp  # one of ComfyUI's own requirements

        url = f"{self.url}/ws?clientId={self.client_id}"
        async with aiohttp.ClientSession() as session, session.ws_connect(url, max_msg_size=0) as socket:
            if on_preview is not None:
                await socket.send_json({"type": "feature_flags", "data": SHOWS_PICTURES})
                while (await socket.receive_json())["type"] != "feature_flags":
                    pass  # the server answers with its own
            queued = self.queue(prompt, workflow=workflow, on_refused=on_refused)
            async for message in socket:
                if message.type is aiohttp.WSMsgType.BINARY and message.data[:4] == PREVIEW_EVENT and on_preview:
                    on_preview(message.data[8:])
                if message.type is not aiohttp.WSMsgType.TEXT:
                    continue
                event = json.loads(message.data)
                data = event.get("data") or {}
                if data.get("prompt_id") != queued.prompt_id:
                    continue
                if event["type"] == "progress":
                    on_progress(str(data["node"]), data["value"], data["max"])
                if event["type"] in ("execution_success", "execution_error", "execution_interrupted"):
                    return queued
        raise RunError("the server closed the connection")

    def run(
        self,
        prompt: Json,
        *,
        workflow: Json | None = None,
        on_progress: Progress | None = None,
        on_preview: Preview | None = None,
        on_refused: Refusal | None = None,
    ) -> Result:
        """Queue, follow and wait; an error while running raises ``RunError``. Previews come only with progress."""
        import asyncio

        if on_progress is None:
            queued = self.queue(prompt, workflow=workflow, on_refused=on_refused)
        else:
            queued = asyncio.run(self._follow(prompt, workflow, on_progress, on_preview, on_refused))
        result = replace(self.wait(queued.prompt_id), refused=queued.refused)
        if result.status.get("status_str") != "success":
            raise RunError(_failure(result.status))
        return result


def node_name(node_id: str, prompt: Json) -> str:
    """Name a node as messages do, with the title that the user gave it."""
    node = prompt.get(node_id, {})
    title = (node.get("_meta") or {}).get("title")
    return f"node {node_id} ({node.get('class_type')}{f', {title!r}' if title else ''})"


def _reasons(body: str, sent: Json | None) -> str:
    try:
        answer = json.loads(body)
    except json.JSONDecodeError:
        return body
    first = answer["error"]["message"] if isinstance(answer.get("error"), dict) else body
    return "\n".join([first, *_node_reasons(answer.get("node_errors") or {}, (sent or {}).get("prompt", {}))])


def _node_reasons(node_errors: Mapping[str, Json], prompt: Json) -> list[str]:
    """Say in a line per node and reason why the server refused it."""
    lines = [
        f"{node_name(node_id, prompt)}: {error['message']}: {error['details']}"
        for node_id, node in node_errors.items()
        for error in node["errors"]
    ]
    return list(dict.fromkeys(lines))


def _refused(node_errors: Mapping[str, Json], prompt: Json) -> tuple[str, ...]:
    """Say why some outputs are left out and, last, which; empty if none is."""
    lost = dict.fromkeys(output for node in node_errors.values() for output in node["dependent_outputs"])
    if not lost:
        return ()
    return (*_node_reasons(node_errors, prompt), f"not made: {', '.join(node_name(output, prompt) for output in lost)}")


def _failure(status: Json) -> str:
    for name, data in status.get("messages", []):
        if name == "execution_error":
            return f"node {data['node_id']} ({data['node_type']}): {data['exception_message'].strip()}"
        if name == "execution_interrupted":
            return f"interrupted in node {data['node_id']} ({data['node_type']})"
    return f"the run ended with {status}"


def progress_printer(prompt: Json) -> Progress:
    """Print one line per tenth of each node's work."""
    shown: dict[str, int] = {}
    start = time.monotonic()

    def show(node_id: str, done: int, total: int) -> None:
        tenth = 10 * done // max(1, total)
        if tenth == shown.get(node_id):
            return
        shown[node_id] = tenth
        name = prompt.get(node_id, {}).get("class_type", node_id).removeprefix("FlashForward")
        seconds = time.monotonic() - start
        print(f"{seconds:6.1f} s  {node_id:>3} {name:12} {'#' * tenth:10} {done}/{total}", file=sys.stderr, flush=True)

    return show


def read_workflow(file: Path) -> Json:
    """Read a workflow's file; what is none raises ``RunError``."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"cannot read the workflow {file}: {error}; name a JSON file that the editor saved") from error
    if not isinstance(found, dict):
        raise RunError(f"cannot read the workflow {file}: it is no JSON object; name a file that the editor saved")
    return found


def load_workflow(
    client: Client, file: Path, *, prompt: str | None = None, seed: int | None = None
) -> tuple[Json, Json | None]:
    """Read a workflow in either form; return the server's form, and the editor's when there is one."""
    workflow = read_workflow(file)
    if not is_editor_format(workflow):
        if prompt is not None or seed is not None:
            raise RunError("--prompt and --seed need a workflow as the editor saves it, not its API export")
        return workflow, None
    info = client.object_info()
    try:
        changed = with_overrides(workflow, info, prompt=prompt, seed=seed)
        return to_api(changed, info), changed
    except WorkflowError as error:
        raise RunError(f"{file}: {error}") from error


def run_file(
    url: str, file: Path, *, output: Path | None = None, prompt: str | None = None, seed: int | None = None
) -> int:
    """Run a workflow file; print each render's SHA-256 of its latents and, last, the path of each video.

    Without the server's ``output`` folder, the place in it of each file that was saved. What the server refused of the
    workflow is on stderr before the rest runs, and at the end which outputs are missing. Return the exit status: 1 if
    some are.
    """
    client = Client(url)
    api, editor = load_workflow(client, file, prompt=prompt, seed=seed)
    result = client.run(api, workflow=editor, on_progress=progress_printer(api), on_refused=_say_refused)
    for line in result.sha256_lines(api):
        print(line)
    for path in result.files(output or Path()):
        if output is None:
            print(f"in ComfyUI's output folder: {path}", flush=True)
        elif path.suffix in VIDEO_SUFFIXES:
            print(path, flush=True)
    if result.refused:
        print(f"refused in part, as said above; {result.refused[-1]}", file=sys.stderr, flush=True)
    return 1 if result.refused else 0


def _say_refused(lines: tuple[str, ...]) -> None:
    print("refused in part; the rest runs", *lines, sep="\n", file=sys.stderr, flush=True)
