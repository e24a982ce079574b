"""The pictures of the help pages: `web/docs/<node>/<language>.webp`, taken from the real editor.

    .venv/bin/python scripts/help_pictures.py [--language ko] [NODE...]

`help_graphs.mjs` says what is in them. Needs chromium, `npm ci --prefix tests/browser`, and fonts for Korean and
Chinese.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from comfy_host import Server, provisioned
from PIL import Image
from translations import LANGUAGES

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "web" / "docs"
QUALITY = 80  # webp; texts stay sharp, and a picture takes 10 to 50 kB


def take(url: str, language: str, nodes: list[str]) -> None:
    """Draw the nodes' graphs in the editor of the server at ``url``, and put the pictures beside the pages."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with TemporaryDirectory() as folder:
        line = ["node", str(ROOT / "scripts" / "help_pictures.mjs"), url, str(chromium), language, folder, *nodes]
        subprocess.run(line, check=True)
        for shot in sorted(Path(folder).glob("*.png")):
            target = PAGES / shot.stem / f"{language}.webp"
            target.parent.mkdir(parents=True, exist_ok=True)
            with Image.open(shot) as image:
                image.convert("RGB").save(target, quality=QUALITY, method=6)
            print(f"{target.relative_to(ROOT)}: {target.stat().st_size // 1000} kB")


def main() -> None:
    parser = argparse.ArgumentParser(description="Take the help pages' pictures.")
    parser.add_argument("nodes", nargs="*", help="node ids; all by default")
    parser.add_argument("--language", choices=LANGUAGES, help="all by default")
    args = parser.parse_args()
    host = provisioned()
    if host is None:
        sys.exit("no ComfyUI here; run: python3 scripts/comfy_host.py provision --dev")
    with TemporaryDirectory() as data, Server(host=host, data=Path(data)) as server:
        for language in [args.language] if args.language else LANGUAGES:
            take(server.url, language, args.nodes)


if __name__ == "__main__":
    main()
