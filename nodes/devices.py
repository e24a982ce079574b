"""Where rollouts run: the Devices node, and what holds when none is connected."""

import os
import re
from functools import lru_cache
from typing import Any

import comfy.model_management
import torch
from comfy.cli_args import args
from comfy_api.latest import io

from flashforward_core.engine.forward import FastOptions
from flashforward_core.engine.memory import KV_CHOICES, OFFLOAD_CHOICES, MemoryOptions
from flashforward_core.engine.placement import DECODES, LAYOUTS, ORDERS
from flashforward_core.engine.ray_lanes import check_address
from flashforward_core.engine.rollout import DevicePlan

from .sockets import CATEGORY, DevicesSocket, expert

AUTO = "auto"
MAX_LANES = 64
TRUSTED = "FLASHFORWARD_RAY"  # this variable of the server's environment lists the clusters that workflows may name
_ENTRY = re.compile(r"[a-z]+(?::\d+)?(?:\*(\d+))?")


def default_device() -> torch.device:
    """The device that ComfyUI itself computes on; the CPU when it was started with --cpu."""
    return torch.device(comfy.model_management.get_torch_device())


def default_devices() -> DevicePlan:
    """Run on ComfyUI's own device."""
    return DevicePlan(devices=(str(default_device()),))


def device_plan(
    *,
    devices: str = AUTO,
    layout: str = AUTO,
    order: str = ORDERS[0],
    decode: str = AUTO,
    ray_address: str = "",
    kv: str = KV_CHOICES[0],
    offload: str = OFFLOAD_CHOICES[0],
    budget_gib: float = 0.0,
    batch_diagonal: bool = False,
) -> DevicePlan:
    """Read the Devices node's values; ``ValueError`` names what cannot be read.

    Devices that this machine lacks are no error: a workflow survives opening elsewhere (see ``DevicePlan.resolve``).
    """
    if layout != AUTO and layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} is unknown; use one of: {', '.join([AUTO, *LAYOUTS])}")
    if order not in ORDERS:
        raise ValueError(f"order={order!r} is unknown; use one of: {', '.join(ORDERS)}")
    if decode not in DECODES:
        raise ValueError(f"decode={decode!r} is unknown; use one of: {', '.join(DECODES)}")
    ray_address = ray_address.strip()
    _check_trust(ray_address)
    memory = MemoryOptions(kv=kv, offload=offload, budget_gib=budget_gib)
    entries = [part.strip().lower() for part in devices.split(",")]
    lanes = sum(_lanes(entry, devices=devices) for entry in entries)
    if lanes > MAX_LANES:
        raise ValueError(f"devices={devices!r} asks for {lanes} lanes, above {MAX_LANES}; use fewer")
    if args.cpu and not ray_address:  # ComfyUI was told to leave the GPUs alone, so "all of them" is none
        entries = ["cpu" if entry == AUTO else entry for entry in entries]
    return DevicePlan(
        devices=tuple(entries),
        layout=layout,
        order=order,
        decode=decode,
        ray_address=ray_address,
        fast=FastOptions(batch_diagonal=batch_diagonal),
        memory=memory,
    )


def _check_trust(ray_address: str) -> None:
    """Refuse clusters that only the workflow knows: what joins one runs what it is sent."""
    if not ray_address:
        return
    check_address(ray_address)
    trusted = [address.strip() for address in os.environ.get(TRUSTED, "").split(",")]
    if ray_address not in (AUTO, *trusted):
        raise ValueError(
            f"ray_address={ray_address!r} is not trusted here; use auto after `ray start --address={ray_address}` on "
            f"this machine, or start ComfyUI with {TRUSTED}={ray_address}"
        )


def _lanes(entry: str, *, devices: str) -> int:
    """Count the lanes that an entry asks for; ``auto`` is at least one."""
    match = _ENTRY.fullmatch(entry)
    count = int(match[1] or 1) if match else 0
    if count < 1:
        raise ValueError(
            f"devices={devices!r} cannot be read at {entry!r}; use auto, or names with commas such as cuda:0,cuda:1 or "
            "cpu*4 (four lanes on the CPU)"
        )
    return count


@lru_cache(maxsize=64)
def resolved(plan: DevicePlan) -> tuple[str, ...]:
    """Return the device of each lane. A missing device is logged once per choice, not at every redraw of the page."""
    return plan.resolve()


class Devices(io.ComfyNode):
    """Choose the devices that a rollout is spread over, and how."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FlashForwardDevices",
            display_name="Devices",
            category=CATEGORY,
            description="Chooses the devices that a rollout is spread over. The video is the same on any of them; only "
            "the time changes. Connect it to Plan, whose timeline shows what it gains.",
            inputs=[
                io.String.Input(
                    "devices",
                    default=AUTO,
                    tooltip="auto: every GPU. Or names with commas: cuda:0,cuda:1; cpu*4 is four lanes on the CPU. "
                    "What this machine lacks is left out.",
                ),
                io.Combo.Input(
                    "layout",
                    options=[AUTO, *LAYOUTS],
                    default=AUTO,
                    tooltip="Where the planner goes. auto takes the shortest as simulated; interleaved: between the "
                    "chunks; prelude: all of it first; streaming: a device of its own; single: one device.",
                ),
                expert(
                    io.Combo,
                    "order",
                    options=list(ORDERS),
                    default=ORDERS[0],
                    tooltip="latency: first frames early. memory: on few devices, all chunks of a stage before the "
                    "next stage, so that one stage's history is held at a time.",
                ),
                expert(
                    io.Combo,
                    "decode",
                    options=list(DECODES),
                    default=AUTO,
                    optional=True,
                    tooltip="Where frames are decoded while the video renders. own: the last device does nothing else; "
                    "split: the last two, each with half of the decoder's layers; shared: the device of the last "
                    "stage; any: whichever device is idle; auto: a device without a stage, if there is one.",
                ),
                expert(
                    io.String,
                    "ray_address",
                    default="",
                    optional=True,
                    tooltip="Empty: this machine. auto: the Ray cluster that this machine is part of; devices are then "
                    "the cluster's. HOST:PORT needs to be trusted by whoever runs the server.",
                ),
                *_memory_inputs(),
                expert(
                    io.Boolean,
                    "batch_diagonal",
                    default=False,
                    optional=True,
                    tooltip="Runs two chunks' forwards that are ready on one device as one. It may be faster for small "
                    "models; the video differs a little, and Wavefront Render reuses nothing.",
                ),
            ],
            outputs=[DevicesSocket.Output("devices_out", display_name="devices", tooltip="For Plan.")],
        )

    @classmethod
    def validate_inputs(cls, **inputs: Any) -> bool:
        texts = {name: inputs[name] for name in ("devices", "ray_address") if isinstance(inputs.get(name), str)}
        device_plan(**texts)  # a linked value is known, and read, when the node runs
        return True

    @classmethod
    def execute(cls, *, devices: str, layout: str, order: str, **optional: Any) -> io.NodeOutput:
        return io.NodeOutput(device_plan(devices=devices, layout=layout, order=order, **optional))


def _memory_inputs() -> list[Any]:
    return [
        expert(
            io.Combo,
            "kv",
            options=list(KV_CHOICES),
            default=KV_CHOICES[0],
            optional=True,
            tooltip="How the history is held. auto: in the weights' precision. fp8: in half of bf16's memory; the "
            "video changes a little.",
        ),
        expert(
            io.Combo,
            "offload",
            options=list(OFFLOAD_CHOICES),
            default=OFFLOAD_CHOICES[0],
            optional=True,
            tooltip="on: weights that do not fit stay in the computer's memory and are copied shortly before they are "
            "used. The same video, slower. For models from files, on a GPU.",
        ),
        expert(
            io.Float,
            "budget_gib",
            default=0.0,
            min=0.0,
            max=1024.0,
            step=0.5,
            optional=True,
            tooltip="The most GiB that a rollout may take on each device; 0: all that is free. What needs more is "
            "refused before it starts.",
        ),
    ]
