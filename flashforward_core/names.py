"""What video files may be called. Needs the standard library only."""

import re
from pathlib import PurePath

UNFINISHED = re.compile(r"\.(partial|finished)(-\d+)?\.mp4$", re.IGNORECASE)


def check_name(path: PurePath) -> None:
    """Raise ``ValueError`` for a name that unfinished videos have: it may be another writer's."""
    if UNFINISHED.search(path.name):
        raise ValueError(f"out={path.name!r} is how unfinished videos are called; use another name, such as clip.mp4")
