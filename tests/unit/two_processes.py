"""Distils a tiny model with a LoRA critic, alone or as one of two processes (``test_train_sharded.py``).

Both see the same global batch of two: one process as two batches that a step averages, two processes as one each.
"""

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from safetensors.torch import load_file
from torch import Tensor, nn

from flashforward_core.graph.task import Role
from flashforward_core.model.lora import save_role_lora
from flashforward_core.model.transformer import CausalWanTransformer
from flashforward_core.train.distill import DistillConfig, DistillStep, Turn, lora_critic
from flashforward_core.train.loop import LoopConfig, train
from flashforward_core.train.rollout import layout_for
from flashforward_core.train.sharding import shard

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from conftest import TINY, Rig

STEPS = 4
PROCESSES = 2


def trained(
    folder: Path, accelerator: Accelerator, *, sharded: bool, stop_after: int | None = None
) -> dict[str, Tensor]:
    """Train all of the student and the critic's LoRA; return averaged weights, and leave the renderer's LoRA file."""
    torch.set_num_threads(1)
    rig = Rig()
    student = rig.model(torch.float32).requires_grad_(True)
    teacher = CausalWanTransformer(TINY).requires_grad_(False)
    texts = [text.to(accelerator.device) for text in rig.texts(count=3)]
    layout = layout_for(rig.spec(latent_frames=7), device=accelerator.device)
    config = DistillConfig(window=4, critic_steps=1, checkpoint_blocks=sharded)
    critic = lora_critic(teacher if sharded else teacher.to(accelerator.device), rank=2)
    step = DistillStep(student, critic, layout, config, autocast=False)
    if sharded:
        shard(teacher, device=accelerator.device)
    alone = accelerator.num_processes == 1
    part = -1 if alone else accelerator.process_index

    def batch(_: torch.Generator, number: int) -> tuple[Turn]:
        nonlocal part
        if number == stop_after:
            raise KeyboardInterrupt
        part = (part + 1) % PROCESSES if alone else part
        turn = Turn(
            of_student=number % 2 == 1,
            exit_stage=number // 2 % 2,
            window_starts=(0,),
            student_text=texts[0],
            teacher_text=texts[1],
            empty_text=texts[2],
            real=None,
            teacher=teacher,
            generator=torch.Generator(accelerator.device).manual_seed(10 * number + part),
        )
        return (turn,)

    def keep(module: nn.Module, number: int) -> None:
        save_role_lora(module.model, folder / "lora.safetensors", role=Role.RENDERER, base="tiny")

    loop = LoopConfig(
        out=folder,
        steps=STEPS,
        lr=1e-3,
        warmup=1,
        save_every=2,
        ema_decay=0.5,
        shard=sharded,
        accumulate=PROCESSES if alone else 1,
    )
    best = train(step, loop, accelerator=accelerator, batch=batch, snapshot=keep)
    return {name: tensor.cpu() for name, tensor in best.state_dict().items()} if accelerator.is_main_process else {}


def refused(call: Callable[[], object]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def run_both(out: Path, *, device: str) -> None:
    """Start two processes as torchrun would, but without one of its own; they leave what they found in ``out``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    both = []
    for number in map(str, range(PROCESSES)):
        env = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": str(Path(__file__).parents[2])}
        command = [sys.executable, __file__, str(out), device]
        both.append(subprocess.Popen(command, env={**os.environ, **env}, stderr=subprocess.PIPE, text=True))
    said = [process.communicate()[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], "\n".join(said)[-3000:]


def check(out: Path, alone: dict[str, Tensor], *, atol: float = 2e-5, stray: float = 0.0) -> None:
    """Compare what two processes found with the averaged weights of one, after steps of 1e-3.

    A share ``stray`` of each tensor may be farther than ``atol``.
    """
    found = torch.load(out / "found.pt", weights_only=True)
    for name, tensor in alone.items():
        for way in ("parts", "copies"):
            # sums in another order; Adam makes whole steps out of gradients that are next to nothing
            far = (found[way][name].to(tensor.device) - tensor).abs() > atol
            assert far.float().mean() <= stray, f"{way} {name}: {int(far.sum())} of {far.numel()} are off"
    exported = load_file(out / "parts" / "lora.safetensors")
    layer = "blocks.0.attn1.to_q.lora_B"
    assert torch.equal(exported[f"transformer.{layer}.weight"], found["parts"][f"model.{layer}.renderer.weight"])
    assert "holds a state in '2 parts', this run needs 'one copy'" in found["said"]


def main(out: Path, device: str) -> None:
    """Train sharded, stopped and resumed; then with a copy in each process."""
    unused = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(cpu=device == "cpu", kwargs_handlers=[unused])
    assert accelerator.num_processes == PROCESSES
    found: dict[str, Any] = {}
    try:
        trained(out / "parts", accelerator, sharded=True, stop_after=3)
    except KeyboardInterrupt:
        found["parts"] = trained(out / "parts", accelerator, sharded=True)
    found["said"] = refused(lambda: trained(out / "parts", accelerator, sharded=False))
    found["copies"] = trained(out / "copies", accelerator, sharded=False)
    if accelerator.is_main_process:
        torch.save(found, out / "found.pt")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    main(Path(sys.argv[1]), sys.argv[2])
