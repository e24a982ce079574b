"""How the history is kept small: the KV Policy node."""

from typing import Any

from comfy_api.latest import io

from flashforward_core.kv_policy import (
    KV_POLICIES,
    SPARSE_CHOICES,
    FutureForcingOptions,
    KeepOptions,
    KVPolicy,
    TempCacheOptions,
    WindowOptions,
    sparse_named,
)

from .sockets import CATEGORY, KVPolicySocket, PolicyValue, expert


def policy_value(*, sparse: str = "none", **options: Any) -> PolicyValue:
    """Return what the node's widgets mean; ``ValueError`` names what does not fit. Old workflows have no ``sparse``."""
    return PolicyValue(kv_policy=_policy_options(**options), sparse=sparse_named(sparse))


def _policy_options(
    *, policy: str, budget_frames: int, sink_frames: int, future_weight: float, threshold: float
) -> KVPolicy:
    """Take the values that ``policy`` has."""
    kind = KV_POLICIES[policy]
    if kind is WindowOptions:
        return WindowOptions(budget_frames=budget_frames, sink_frames=sink_frames)
    if kind is FutureForcingOptions:
        return FutureForcingOptions(budget_frames=budget_frames, sink_frames=sink_frames, future_weight=future_weight)
    if kind is TempCacheOptions:
        return TempCacheOptions(budget_frames=budget_frames, threshold=threshold)
    return KeepOptions()


class KVPolicyNode(io.ComfyNode):
    """Choose what of the history stays in memory."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FlashForwardKVPolicy",
            display_name="KV Policy",
            category=CATEGORY,
            description="Chooses what of the history a chunk can look back at, so that it sees further than Plan's "
            "window with a bounded cache. It saves no memory. Connect it to Plan, whose history and sink then do not "
            "count. Needs no training.",
            inputs=[
                io.Combo.Input(
                    "policy",
                    options=list(KV_POLICIES),
                    default="future_forcing",
                    tooltip="keep: Plan's own window. window: the first frames and the latest. future_forcing: what "
                    "coming frames are expected to look at; slower. temp_cache: tokens that repeat are stored once; "
                    "only for long budgets and high thresholds.",
                ),
                io.Int.Input(
                    "budget_frames",
                    default=9,
                    min=1,
                    max=3000,
                    tooltip="Latent frames' worth of tokens that are kept at most, the sink's included; one is 4 video "
                    "frames. At least sink_frames + 1 for window, sink_frames + 4 for future_forcing, 1 for "
                    "temp_cache. keep: no use.",
                ),
                io.Int.Input(
                    "sink_frames",
                    default=3,
                    min=0,
                    max=300,
                    tooltip="First latent frames that always stay, within the budget; one is 4 video frames. For "
                    "window and future_forcing.",
                ),
                expert(
                    io.Float,
                    "future_weight",
                    default=0.5,
                    min=0.0,
                    max=1.0,
                    step=0.05,
                    tooltip="1 goes by expected attention only, 0 by attention so far. For future_forcing.",
                ),
                expert(
                    io.Float,
                    "threshold",
                    default=0.9,
                    min=0.05,
                    max=1.1,
                    step=0.01,
                    tooltip="How alike tokens must be to be stored once, as a cosine; above 1 none are. For "
                    "temp_cache.",
                ),
                expert(
                    io.Combo,
                    "sparse",
                    options=list(SPARSE_CHOICES),
                    default="none",
                    optional=True,
                    tooltip="Lets later stages attend only to tokens that are like theirs, with any policy. self: of "
                    "the video (AnnSA). cross: of the prompt (AnnCA). It changes the video; only self saves "
                    "time, with long caches. self and both lose the embedded model's sprites.",
                ),
            ],
            outputs=[KVPolicySocket.Output("kv_policy", display_name="kv_policy", tooltip="For Plan.")],
        )

    @classmethod
    def validate_inputs(cls, **inputs: Any) -> bool | str:
        missing = [entry.id for entry in cls.define_schema().inputs if not entry.optional and entry.id not in inputs]
        if missing:
            raise ValueError(f"{missing[0]} is missing; use the value of the node's widget")
        if None not in inputs.values():  # linked values are checked when the node runs
            policy_value(**inputs)  # a ValueError reaches the user once; a returned text once per input
        return True

    @classmethod
    def execute(cls, **values: Any) -> io.NodeOutput:
        return io.NodeOutput(policy_value(**values))
