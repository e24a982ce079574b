"""Talk to a running ComfyUI over HTTP: queue a workflow, follow its progress, find what it wrote."""

import json
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
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


Progress = Callable[[str, int, int], None]
"""Called with node id, steps done and steps in all."""

Preview = Callable[[bytes], None]
"""Called with each preview's encoded image."""
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
            raise RunError(_reasons(error.read().decode(errors="replace"))) from error
        return json.loads(content) if content.strip() else None

    def object_info(self) -> dict[str, Json]:
        """Fetch every node's schema."""
        return self.request("/object_info")  # type: ignore[no-any-return]

    def queue(self, prompt: Json, *, workflow: Json | None = None) -> str:
        """Queue the server's form of a workflow; the editor's form goes along as metadata. Return the prompt's id."""
        body: Json = {"prompt": prompt, "client_id": self.client_id}
        if workflow is not None:
            body["extra_data"] = {"extra_pnginfo": {"workflow": workflow}}
        return self.request("/prompt", body)["prompt_id"]  # type: ignore[no-any-return]

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
        self, prompt: Json, workflow: Json | None, on_progress: Progress, on_preview: Preview | None
    ) -> str:
        import aiohttp  # one of ComfyUI's own requirements

        url = f"{self.url}/ws?clientId={self.client_id}"
        async with aiohttp.ClientSession() as session, session.ws_connect(url, max_msg_size=0) as socket:
            if on_preview is not None:
                await socket.send_json({"type": "feature_flags", "data": SHOWS_PICTURES})
                while (await socket.receive_json())["type"] != "feature_flags":
                    pass  # the server answers with its own
            prompt_id = self.queue(prompt, workflow=workflow)
            async for message in socket:
                if message.type is aiohttp.WSMsgType.BINARY and message.data[:4] == PREVIEW_EVENT and on_preview:
                    on_preview(message.data[8:])
                if message.type is not aiohttp.WSMsgType.TEXT:
                    continue
                event = json.loads(message.data)
                data = event.get("data") or {}
                if data.get("prompt_id") != prompt_id:
                    continue
                if event["type"] == "progress":
                    on_progress(str(data["node"]), data["value"], data["max"])
                if event["type"] in ("execution_success", "execution_error", "execution_interrupted"):
                    return prompt_id
        raise RunError("the server closed the connection")

    def run(
        self,
        prompt: Json,
        *,
        workflow: Json | None = None,
        on_progress: Progress | None = None,
        on_preview: Preview | None = None,
    ) -> Result:
        """Queue, follow and wait; an error while running raises ``RunError``. Previews come only with progress."""
        import asyncio

        if on_progress is None:
            prompt_id = self.queue(prompt, workflow=workflow)
        else:
            prompt_id = asyncio.run(self._follow(prompt, workflow, on_progress, on_preview))
        result = self.wait(prompt_id)
        if result.status.get("status_str") != "success":
            raise RunError(_failure(result.status))
        return result


def _reasons(body: str) -> str:
    try:
        answer = json.loads(body)
    except json.JSONDecodeError:
        return body
    lines = [answer["error"]["message"]] if isinstance(answer.get("error"), dict) else [body]
    for node_id, node in (answer.get("node_errors") or {}).items():
        for error in node["errors"]:
            lines.append(f"node {node_id} ({node['class_type']}): {error['message']}: {error['details']}")
    return "\n".join(dict.fromkeys(lines))


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
        print(f"{seconds:6.1f} s  {name:12} {'#' * tenth:10} {done}/{total}", file=sys.stderr, flush=True)

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


def run_file(url: str, file: Path, *, output: Path, prompt: str | None = None, seed: int | None = None) -> list[Path]:
    """Run a workflow file and print the latents' SHA-256 and, last, the path of each video."""
    client = Client(url)
    api, editor = load_workflow(client, file, prompt=prompt, seed=seed)
    result = client.run(api, workflow=editor, on_progress=progress_printer(api))
    files = [path for path in result.files(output) if path.suffix in VIDEO_SUFFIXES]
    for digest in result.sha256():
        print(f"latents sha256 {digest}")
    for path in files:
        print(path, flush=True)
    return files
