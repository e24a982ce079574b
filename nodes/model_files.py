"""ComfyUI's model folders: which backbones and LoRAs are there, under names that survive another machine."""

from pathlib import Path

import folder_paths

from flashforward_core.model.formats import FILE_SUFFIXES, WEIGHTS

NONE = "none"
EMBEDDED = "embedded"
FOLDERS = ("diffusion_models", "checkpoints", "diffusers")
"""Where backbones are looked for; those of the first are listed by their bare name, as ComfyUI's own loader does."""


def backbone_files() -> dict[str, Path]:
    """Return every single file and diffusers folder by its name in the list; which of them are Wan shows on loading."""
    found: dict[str, Path] = {}
    for folder in FOLDERS:
        prefix = "" if folder == FOLDERS[0] else f"{folder}/"
        for root in _roots(folder):
            names, _ = folder_paths.recursive_search(root, excluded_dir_names=[".git"])
            relative = [name.replace("\\", "/") for name in names]
            single = [] if folder == "diffusers" else _single_files(relative)
            for name in sorted([*single, *_diffusers_folders(relative)]):
                found.setdefault(prefix + name, Path(root) / name)
    return found


def _roots(folder: str) -> list[str]:
    return folder_paths.get_folder_paths(folder) if folder in folder_paths.folder_names_and_paths else []


def _single_files(names: list[str]) -> list[str]:
    """Weight files that are no part of a diffusers folder."""
    return [n for n in names if n.lower().endswith(FILE_SUFFIXES) and not n.rpartition("/")[2].startswith(WEIGHTS)]


def _diffusers_folders(names: list[str]) -> list[str]:
    """Folders with a config and diffusers' weights; for a whole pipeline, the folder around its transformer."""
    with_weights = {n.rpartition("/")[0] for n in names if n.rpartition("/")[2].startswith(WEIGHTS)}
    with_config = {n.rpartition("/")[0] for n in names if n.rpartition("/")[2] == "config.json"}
    folders = sorted(f for f in with_weights & with_config if f and f.rpartition("/")[2] != "vae")
    return [f.rpartition("/")[0] if f.rpartition("/")[2] == "transformer" and "/" in f else f for f in folders]


def lora_names() -> list[str]:
    """Return ComfyUI's LoRA files by name."""
    return [name.replace("\\", "/") for name in folder_paths.get_filename_list("loras")]


def backbone_path(name: str) -> Path:
    """Return the file or folder of a name in the list, whichever slashes it was saved with.

    An unknown one raises ``ValueError`` that says where files go.
    """
    files = backbone_files()
    path = files.get(name.replace("\\", "/"))
    if path is None:
        raise ValueError(
            f"backbone={name!r} is not in ComfyUI's {', '.join(FOLDERS[:-1])} or {FOLDERS[-1]} folders; put the "
            f"file into models/{FOLDERS[0]}, or choose one of the {len(files)} that are there"
        )
    return path


def lora_path(name: str, *, field: str) -> Path:
    """Return the file of a LoRA's name; an unknown one raises ``ValueError`` naming ``field``."""
    if name.replace("\\", "/") not in lora_names():
        raise ValueError(f"{field}={name!r} is not in ComfyUI's loras folder; put the file into models/loras")
    path = folder_paths.get_full_path("loras", name.replace("\\", "/"))
    return Path(path or folder_paths.get_full_path_or_raise("loras", name.replace("/", "\\")))


def stamp(path: Path) -> str:
    """Return what changes when a file, or a file of a folder, does: names, sizes and times."""
    files = sorted(f for f in path.rglob("*") if f.is_file()) if path.is_dir() else [path]
    stats = [(f.name, f.stat()) for f in files]
    return "\n".join(f"{name}|{found.st_size}|{found.st_mtime_ns}" for name, found in stats)
