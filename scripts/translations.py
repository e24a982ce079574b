"""The nodes' names and tooltips in every language: `locales/<language>/nodeDefs.json`, as ComfyUI reads them.

    .venv/bin/python scripts/translations.py

writes the English file from the live schema and says what the other languages lack or no longer need.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from comfy_client import Client
from comfy_host import Server, provisioned

Json = dict[str, Any]
LOCALES = Path(__file__).resolve().parents[1] / "locales"
LANGUAGES = ("en", "ko", "zh")
SPECIAL = re.compile(r"[{}@|]")  # the editor's message syntax; literal ones are written {'|'}


def escape(text: str) -> str:
    """Write a text as one of the editor's messages."""
    return SPECIAL.sub(lambda found: "{'" + found[0] + "'}", text)


def unescape(text: str) -> str:
    """Read one of the editor's messages."""
    return re.sub(r"\{'(.)'\}", r"\1", text)


def path(language: str, name: str = "nodeDefs") -> Path:
    return LOCALES / language / f"{name}.json"


def english(object_info: Json) -> Json:
    """What our nodes say of themselves, as a locale file: the text of every node, input and output."""
    return {name: _node(info) for name, info in object_info.items() if name.startswith("FlashForward")}


def _node(info: Json) -> Json:
    names = [(group, name) for group in ("required", "optional") for name in info["input_order"].get(group, [])]
    inputs = {name: _entry(name, info["input"][group][name][1].get("tooltip", "")) for group, name in names}
    outputs = zip(info["output_name"], info["output_tooltips"], strict=True)
    return {
        "display_name": escape(info["display_name"]),
        "description": escape(info["description"]),
        "inputs": inputs,
        "outputs": {str(at): _entry(*texts) for at, texts in enumerate(outputs)},
    }


def _entry(name: str, tooltip: str) -> Json:
    return {"name": escape(name), "tooltip": escape(tooltip)}


def flat(messages: Json, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield every message with its dotted key."""
    for key, value in messages.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def problems(own: Json, found: Json) -> list[str]:
    """What a language lacks or has too much of, beside the English messages."""
    wanted, there = dict(flat(own)), dict(flat(found))
    missing = [f"missing: {key} ({wanted[key]})" for key in wanted if not there.get(key, "").strip()]
    return missing + [f"stale: {key}" for key in there if key not in wanted]


def live_object_info() -> Json:
    """Ask a server of its own what the nodes are."""
    host = provisioned()
    if host is None:
        sys.exit("no ComfyUI here; run: python3 scripts/comfy_host.py provision --dev")
    with TemporaryDirectory() as data, Server(host=host, cpu=True, data=Path(data)) as server:
        return Client(server.url).object_info()


def main() -> int:
    own = english(live_object_info())
    path("en").write_text(json.dumps(own, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    wrong = [
        f"{language}: {problem}"
        for language in LANGUAGES[1:]
        for problem in problems(own, json.loads(path(language).read_text(encoding="utf-8")))
    ]
    print("\n".join(wrong) or "every language is complete")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
