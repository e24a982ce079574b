"""What training leaves on disk: an export changes at once, and wrong files are named before work starts."""

import argparse
import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from flashforward_core.graph.task import Role
from flashforward_core.model.files import read_tensors
from flashforward_core.model.loading import ASSETS, load_embedded
from flashforward_core.model.roles import TARGETS, role_linears
from flashforward_core.model.text import ByteT5Encoder, TextConfig
from flashforward_core.model.transformer import CausalWanTransformer
from flashforward_core.train.base import save_base
from flashforward_core.train.export import export_model
from flashforward_core.train.wan import export_wan
from flashforward_core.train.weights import add_roles, base_model, new_models, student

pytestmark = pytest.mark.cpu

Export = Callable[[CausalWanTransformer, Path], None]


def export_embedded(
    model: CausalWanTransformer, folder: Path, *, roles: tuple[Role, ...] = tuple(Role), vae: Path = ASSETS / "vae"
) -> None:
    torch.manual_seed(0)
    text = ByteT5Encoder(TextConfig(d_model=12, d_kv=4, d_ff=8, num_heads=2, num_layers=1, text_len=5))
    export_model(model, text, vae=vae, folder=folder, roles=roles)


def export_to_wan(model: CausalWanTransformer, folder: Path) -> None:
    export_wan(model, folder, roles=tuple(Role), frozen=False)


def contents(folder: Path) -> dict[str, object]:
    """Return what each file says; safetensors write their metadata in any order."""
    found: dict[str, object] = {}
    for path in folder.rglob("*"):
        if path.suffix == ".safetensors":
            tensors, metadata = read_tensors(path, what="weights")
            said = {name: tensor.flatten().view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}
            found[str(path.relative_to(folder))] = said, metadata
        elif path.is_file():
            found[str(path.relative_to(folder))] = path.read_bytes()
    return found


def two_models(rig: Any) -> tuple[CausalWanTransformer, CausalWanTransformer]:
    """Return models that differ in every tensor."""
    other = rig.model(torch.float32)
    for parameter in other.parameters():
        parameter.data += 1
    return rig.model(torch.float32), other


def test_an_export_that_fails_half_way_leaves_the_old_model(rig: Any, tmp_path: Path) -> None:
    old, new = two_models(rig)
    export_embedded(old, tmp_path / "assets")
    before = contents(tmp_path / "assets")
    with pytest.raises(FileNotFoundError):
        export_embedded(new, tmp_path / "assets", vae=tmp_path / "none")  # the last part to be written
    assert contents(tmp_path / "assets") == before


def test_an_export_for_wan_that_fails_half_way_leaves_the_old_model(rig: Any, tmp_path: Path) -> None:
    old, new = two_models(rig)
    export_to_wan(old, tmp_path / "assets")
    before = contents(tmp_path / "assets")
    for layer in role_linears(new).values():
        del layer.lora_A[Role.RENDERER.value]  # the role that is written last has nothing to write
    with pytest.raises(ValueError, match="role=renderer has no LoRA to save"):
        export_to_wan(new, tmp_path / "assets")
    assert contents(tmp_path / "assets") == before


@pytest.mark.parametrize("export", [export_embedded, export_to_wan])
@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_kill_between_renames_leaves_a_whole_model_and_the_next_export_tidies_up(
    rig: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, export: Export, renames: int
) -> None:
    old, new = two_models(rig)
    folder, notes = tmp_path / "assets", {"notes.txt": b"a user's"}
    export(new, folder)
    after = contents(folder)
    export(old, folder)
    (folder / "notes.txt").write_bytes(notes["notes.txt"])
    before = contents(folder)
    rename, left = Path.rename, list(range(renames))

    def killed(path: Path, target: Path) -> Path:
        if not left:
            raise KeyboardInterrupt
        left.pop()
        return rename(path, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", killed)
        export(new, folder)
    found = folder if folder.exists() else tmp_path / ".assets.old"
    assert contents(found) == (after if renames == 2 else before)
    export(new, folder)
    assert contents(folder) == after | notes
    assert [path.name for path in tmp_path.iterdir()] == ["assets"]


def test_an_export_without_roles_leaves_none_of_the_last_one(rig: Any, tmp_path: Path) -> None:
    old, new = two_models(rig)
    export_embedded(old, tmp_path)
    assert len(list(tmp_path.glob("*_lora.safetensors"))) == 2
    export_embedded(new, tmp_path, roles=())
    assert not list(tmp_path.glob("*_lora.safetensors"))
    assert not role_linears(load_embedded(tmp_path, merged=False).models[Role.PLANNER])


def test_what_a_user_put_beside_an_export_stays(rig: Any, tmp_path: Path) -> None:
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "notes.txt").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "assets")
    for model in two_models(rig):
        export_embedded(model, tmp_path / "link")
    assert (tmp_path / "assets" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "link").is_symlink()


@pytest.mark.skipif(os.name == "nt", reason="Windows has no umask")
def test_others_may_read_an_export_where_the_umask_lets_them(rig: Any, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        export_embedded(rig.model(torch.float32), tmp_path / "assets")
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "assets").rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o640}


def options(**changes: Any) -> argparse.Namespace:
    usual = {"wan": None, "frozen": False, "rank": 2, "alpha": None, "targets": TARGETS, "init": None, "teacher": None}
    return argparse.Namespace(**usual | changes)


def trained(path: Path, **changes: Any) -> CausalWanTransformer:
    """Leave an ``sft.pt`` of these options at ``path``; without a rank, a ``base.pt``."""
    model, text = new_models()
    if changes:
        add_roles(model, options(**changes))
    save_base(model, text, path)
    return model


CPU = Accelerator(cpu=True)


def test_distill_has_the_loras_of_sft_whatever_its_own_options_say(tmp_path: Path) -> None:
    targets = ["attn1.to_q", "ffn.net.2"]
    saved = trained(tmp_path / "sft.pt", rank=4, alpha=16.0, targets=targets)
    model, _ = student(tmp_path / "sft.pt", options(rank=8), CPU)
    assert sorted(role_linears(model)) == sorted(role_linears(saved))
    assert {layer.scale(role) for layer in role_linears(model).values() for role in Role} == {4.0}
    assert {layer.alphas[role.value] for layer in role_linears(model).values() for role in Role} == {16.0}
    for name, tensor in saved.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])
    kept = torch.load(tmp_path / "sft.pt", weights_only=True)["roles"]
    assert kept == {"rank": 4, "alpha": 16.0, "targets": targets}


def test_an_sft_file_from_before_it_kept_them_takes_the_options(tmp_path: Path) -> None:
    trained(tmp_path / "sft.pt", rank=4)
    old = torch.load(tmp_path / "sft.pt", weights_only=True)
    del old["roles"]
    torch.save(old, tmp_path / "sft.pt")
    model, _ = student(tmp_path / "sft.pt", options(rank=4, alpha=8.0), CPU)
    assert {layer.scale(Role.PLANNER) for layer in role_linears(model).values()} == {2.0}
    with pytest.raises(ValueError, match=r"sft.pt holds other weights than this model.*name an sft.pt"):
        student(tmp_path / "sft.pt", options(rank=2), CPU)


def test_an_alpha_of_0_is_no_missing_one() -> None:
    model, _ = new_models()
    add_roles(model, options(rank=4, alpha=0.0))
    assert {layer.scale(Role.PLANNER) for layer in role_linears(model).values()} == {0.0}


def test_a_student_without_loras_is_refused_before_it_trains(rig: Any, tmp_path: Path) -> None:
    export_embedded(rig.model(torch.float32), tmp_path / "assets", roles=())
    trained(tmp_path / "sft.pt")
    for name in ("assets", "sft.pt"):
        with pytest.raises(ValueError, match=f"{name} has no role LoRAs.*train sft with rank=8"):
            student(tmp_path / name, options(), CPU)


def test_files_that_are_no_weights_of_this_step_are_named(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("cobblestones and other words\n")
    (tmp_path / "empty").touch()
    torch.save({"step": 3, "trained": []}, tmp_path / "state")
    torch.save([1, 2], tmp_path / "list")
    trained(tmp_path / "whole")
    (tmp_path / "truncated").write_bytes((tmp_path / "whole").read_bytes()[:-100_000])
    for name in ("text", "empty", "state", "list", "truncated"):
        with pytest.raises(ValueError, match=rf"{name} .*name a base.pt that train base left"):
            base_model(tmp_path / name, options(), CPU)
        with pytest.raises(ValueError, match=rf"{name} .*name an sft.pt that train sft left"):
            student(tmp_path / name, options(), CPU)
    with pytest.raises(ValueError, match=r"planner_lora.safetensors .*name a base.pt"):
        base_model(ASSETS / "planner_lora.safetensors", options(), CPU)


def test_an_sft_file_is_no_base(tmp_path: Path) -> None:
    trained(tmp_path / "sft.pt", rank=2)
    with pytest.raises(ValueError, match=r"sft.pt holds other weights than this model.*name a base.pt"):
        base_model(tmp_path / "sft.pt", options(), CPU)


def test_a_file_in_the_place_of_wan_weights_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "sft.pt"
    path.touch()
    with pytest.raises(ValueError, match=r"sft.pt is a file; with wan= name a folder"):
        base_model(path, options(wan=tmp_path, teacher=path), CPU)


def test_a_checkpoint_that_cannot_be_written_leaves_the_last_one(tmp_path: Path) -> None:
    trained(tmp_path / "base.pt")
    before = (tmp_path / "base.pt").read_bytes()
    text: Any = SimpleNamespace(state_dict=lambda: {"unwritable": lambda: None})
    with pytest.raises(Exception, match="pickle"):
        save_base(new_models()[0], text, tmp_path / "base.pt")
    assert (tmp_path / "base.pt").read_bytes() == before
