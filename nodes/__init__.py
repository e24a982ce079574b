"""The nodes: the only part of the project that knows ComfyUI."""

import importlib.util
import sys
from pathlib import Path

CORE = "flashforward_core"


def _load_core(folder: Path) -> None:
    """Import the pack's core under its own name without putting the pack on ``sys.path``.

    ComfyUI has a top-level module named ``nodes``, so the pack's folder must never be searched for modules. A core
    from elsewhere that was imported before raises ``ImportError``: two versions must not be mixed.
    """
    loaded = sys.modules.get(CORE)
    if loaded is not None:
        found = Path(str(loaded.__file__)).resolve().parent
        if found != folder.resolve():
            raise ImportError(f"{CORE} was already imported from {found}, not from {folder}; remove one of the two")
        return
    spec = importlib.util.spec_from_file_location(CORE, folder / "__init__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[CORE] = module
    spec.loader.exec_module(module)


_load_core(Path(__file__).resolve().parent.parent / CORE)

from .extension import FlashForwardExtension  # noqa: E402 (the core has to be importable first)

__all__ = ["FlashForwardExtension"]
