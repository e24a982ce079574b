"""The pack's own socket types, and how its inputs are declared."""

import inspect
from dataclasses import dataclass
from typing import Any

from comfy_api.latest import io

from flashforward_core.engine.rollout import DevicePlan
from flashforward_core.kv_policy import KVPolicy, SparseOptions
from flashforward_core.specs import RolloutSpec

CATEGORY = "FlashForward"
MAX_SEED = 0xFFFFFFFFFFFFFFFF

BackboneSocket = io.Custom("FF_BACKBONE")
PlanSocket = io.Custom("FF_PLAN")
AnchorsSocket = io.Custom("FF_ANCHORS")
KVPolicySocket = io.Custom("FF_KV_POLICY")
DevicesSocket = io.Custom("FF_DEVICES")
TimelineSocket = io.Custom("FF_TIMELINE")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanValue:
    """What flows through an FF_PLAN socket."""

    spec: RolloutSpec
    """The rollout; Plan Anchors and Wavefront Render put in their seed."""
    devices: DevicePlan
    node_id: str | None = None
    """The Plan node, whose timeline shows what runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyValue:
    """What flows through an FF_KV_POLICY socket; Plan puts both into its rollout."""

    kv_policy: KVPolicy
    sparse: SparseOptions | None = None


def expert(kind: Any, name: str, **options: Any) -> Any:
    """Declare an input that the editor folds away under "advanced".

    Versions of ComfyUI whose inputs have no such option pass on what they do not know to the editor, which has it.
    """
    if "advanced" in inspect.signature(kind.Input.__init__).parameters:
        return kind.Input(name, **options, advanced=True)
    made = kind.Input(name, **options)
    made.extra_dict = {**(made.extra_dict or {}), "advanced": True}
    return made


def seed_input(tooltip: str) -> Any:
    """Declare a seed that the editor may change after every run."""
    return io.Int.Input("seed", default=0, min=0, max=MAX_SEED, control_after_generate=True, tooltip=tooltip)
