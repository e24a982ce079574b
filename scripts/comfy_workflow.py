"""Turn a workflow as the editor saves it into the form that the server queues, and change its prompt or seed.

Pure functions over JSON; ``object_info`` is what the server's /object_info answers.
"""

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any

Json = dict[str, Any]

WIDGET_TYPES = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")
NOTES = ("Note", "MarkdownNote")
MUTED, BYPASSED = 2, 4  # the editor's node modes
UPLOADS = ("image_upload", "video_upload", "audio_upload", "file_upload")
PROMPT_INPUTS = {"FlashForwardEncodePrompt": "text", "CLIPTextEncode": "text"}


class WorkflowError(ValueError):
    """A workflow that cannot run, with the node and the reason."""


def is_editor_format(workflow: Json) -> bool:
    """Whether it is the editor's form (nodes and links) and not the server's (class_type and inputs)."""
    return isinstance(workflow.get("nodes"), list)


def _inputs(info: Json) -> Iterator[tuple[str, Any, Json]]:
    """Give name, type and options of every input in the schema's order."""
    for group in ("required", "optional"):
        declared = info["input"].get(group, {})
        for name in info.get("input_order", {}).get(group, declared):
            kind, *rest = declared[name]
            yield name, kind, (rest[0] if rest else {})


def widget_slots(info: Json) -> list[str | None]:
    """Name the input of each entry of ``widgets_values``; None where the editor keeps a value of its own."""
    slots: list[str | None] = []
    for name, kind, options in _inputs(info):
        if not (isinstance(kind, list) or kind in WIDGET_TYPES) or options.get("forceInput"):
            continue
        slots.append(name)
        is_seed = kind == "INT" and name in ("seed", "noise_seed")
        if options.get("control_after_generate") or is_seed or any(options.get(key) for key in UPLOADS):
            slots.append(None)  # the control's own value, or the upload button's
    return slots


def _node_info(node: Json, object_info: Mapping[str, Json]) -> Json:
    if node["type"] not in object_info:
        raise WorkflowError(
            f"node {node['id']} is a {node['type']!r}, which this ComfyUI does not have; install its pack"
        )
    return object_info[node["type"]]


def _widget_values(node: Json, info: Json) -> Json:
    """Name the saved values; an input that is newer than the workflow gets its default, as in the editor."""
    values = node.get("widgets_values") or []
    slots = widget_slots(info)
    named = values if isinstance(values, dict) else dict(zip(slots, values, strict=False))
    defaults = {name: _default(kind, options) for name, kind, options in _inputs(info) if name in slots}
    found = {name: named.get(name, defaults[name]) for name in slots if name is not None}
    return {name: value for name, value in found.items() if value is not None}


def _default(kind: Any, options: Json) -> Any:
    """Return a widget's default; a combo without one starts at its first option."""
    choices = kind if isinstance(kind, list) else options.get("options", [])
    return options.get("default", choices[0] if choices else None)


def _links(workflow: Json) -> dict[int, tuple[int, int]]:
    """Map each link to its origin (node, output)."""
    found = {}
    for link in workflow.get("links", []):
        if isinstance(link, dict):
            found[link["id"]] = (link["origin_id"], link["origin_slot"])
        else:
            found[link[0]] = (link[1], link[2])
    return found


def _source(link: int, workflow: Json, links: Mapping[int, tuple[int, int]]) -> tuple[int, int] | None:
    """Follow a link to the node that makes its value; None when that node is muted or its bypass leads nowhere."""
    by_id = {node["id"]: node for node in workflow["nodes"]}
    current: int | None = link
    passed: set[int] = set()
    while current is not None:
        if current in passed:
            raise WorkflowError(f"link {current} leads in a circle of reroutes or bypassed nodes; take it apart")
        passed.add(current)
        origin, slot = links[current]
        node = by_id[origin]
        if node["type"] == "Reroute":
            current = node["inputs"][0].get("link")
        elif node.get("mode") == BYPASSED:
            kind = node["outputs"][slot]["type"]
            matching = [entry.get("link") for entry in node.get("inputs", []) if entry["type"] == kind]
            current = matching[0] if matching else None
        else:
            return None if node.get("mode") == MUTED else (origin, slot)
    return None


@contextlib.contextmanager
def _as_saved() -> Iterator[None]:
    """Turn what a workflow of another shape leads to into a ``WorkflowError``."""
    try:
        yield
    except WorkflowError:
        raise
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise WorkflowError(
            f"the workflow is not as an editor saves it ({type(error).__name__}: {error}); save it again"
        ) from error


def to_api(workflow: Json, object_info: Mapping[str, Json]) -> Json:
    """Convert the editor's form to the server's.

    Covers nodes and their titles, links, reroutes, bypass, mute and notes. Raises ``WorkflowError`` for a node that the
    server lacks, for subgraphs, and for what no editor saves.
    """
    with _as_saved():
        return _to_api(workflow, object_info)


def _to_api(workflow: Json, object_info: Mapping[str, Json]) -> Json:
    if workflow.get("definitions", {}).get("subgraphs"):
        raise WorkflowError("the workflow has subgraphs; unpack them in the editor, or export it with Export (API)")
    links = _links(workflow)
    prompt: Json = {}
    for node in workflow["nodes"]:
        if node["type"] in (*NOTES, "Reroute") or node.get("mode") in (MUTED, BYPASSED):
            continue
        inputs = _widget_values(node, _node_info(node, object_info))
        for entry in node.get("inputs", []):
            if entry.get("link") is None:
                continue
            source = _source(entry["link"], workflow, links)
            if source is not None:
                inputs[entry["name"]] = [str(source[0]), source[1]]
        titled = {"_meta": {"title": node["title"]}} if node.get("title") else {}
        prompt[str(node["id"])] = {"class_type": node["type"], "inputs": inputs, **titled}
    return prompt


def _set_widget(node: Json, name: str, value: Any, object_info: Mapping[str, Json]) -> bool:
    slots = widget_slots(_node_info(node, object_info))
    if name not in slots:
        return False
    if isinstance(node["widgets_values"], dict):
        node["widgets_values"][name] = value
    else:
        node["widgets_values"][slots.index(name)] = value
    return True


def with_overrides(
    workflow: Json, object_info: Mapping[str, Json], *, prompt: str | None = None, seed: int | None = None
) -> Json:
    """Return the editor's form with another prompt text or seed; every seed of the workflow gets the same one."""
    with _as_saved():
        return _with_overrides(workflow, object_info, prompt=prompt, seed=seed)


def _with_overrides(workflow: Json, object_info: Mapping[str, Json], *, prompt: str | None, seed: int | None) -> Json:
    changed = copy.deepcopy(workflow)
    nodes = [node for node in changed["nodes"] if node["type"] not in (*NOTES, "Reroute")]
    if prompt is not None:
        texts = [node for node in nodes if node["type"] in PROMPT_INPUTS]
        if len(texts) != 1:
            raise WorkflowError(f"--prompt needs exactly one prompt node in the workflow; it has {len(texts)}")
        _set_widget(texts[0], PROMPT_INPUTS[texts[0]["type"]], prompt, object_info)
    seeded = [seed is not None and _set_widget(node, "seed", seed, object_info) for node in nodes]
    if seed is not None and True not in seeded:
        raise WorkflowError("--seed needs a node with a seed in the workflow; it has none")
    return changed
