"""How published checkpoints are meant to run. Loading weights does not say it; a preset does. Torch-free."""

import re
from dataclasses import dataclass, replace

from ..registry import Registry
from ..specs import History, RolloutSpec

FLASHFORWARD = "flashforward"
STOCK = "self_forcing"
"""What a checkpoint without a known name runs as."""
FOUR_STAGES = (1.0, 0.75, 0.5, 0.25)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """The rollout that a checkpoint was trained for."""

    schedule: str
    """A name in ``graph.schedules.SCHEDULES``."""
    names: str
    """Regular expression that finds it in a file's lower-case name, without separators."""
    window: int
    """Latent frames that a chunk sees, its own ones included."""
    sink: int = 0
    """Latent frames at the start that stay in the window."""
    chunk_frames: int = 3
    starts: tuple[float, ...] = FOUR_STAGES
    """Unshifted time at which each stage starts."""

    def applied(self, spec: RolloutSpec) -> RolloutSpec:
        """Return ``spec`` with this schedule, chunk, window, sink and stages; size, length and seed stay."""
        history = History(
            chunks=self.window // self.chunk_frames - 1,
            planner_blocks=spec.history.planner_blocks,
            sink=self.sink,
        )
        return replace(
            spec,
            schedule=self.schedule,
            chunk_frames=self.chunk_frames,
            history=history,
            stages=replace(spec.stages, starts=self.starts),
            anchors=spec.anchors if self.schedule == FLASHFORWARD else None,
        )

    def describe(self) -> str:
        """Say in a line what it sets."""
        return (
            f"{self.schedule}, chunks of {self.chunk_frames}, {len(self.starts)} steps, window {self.window}, "
            f"sink {self.sink}"
        )


PRESETS: Registry[Preset] = Registry("preset")
PRESETS.add(FLASHFORWARD)(Preset(schedule="flashforward", names="flashforward", window=18))
PRESETS.add("hiar")(Preset(schedule="hiar", names="hiar", window=21))
PRESETS.add("longlive")(Preset(schedule="self_forcing", names="longlive", window=12, sink=3))
PRESETS.add("reward_forcing")(Preset(schedule="self_forcing", names="rewardforcing", window=9, sink=3))
PRESETS.add("rolling_forcing")(
    Preset(schedule="self_forcing", names="rollingforcing", window=21, sink=3, starts=(1.0, 0.8, 0.6, 0.4, 0.2))
)
PRESETS.add("krea")(Preset(schedule="self_forcing", names="krea", window=6))
PRESETS.add("causal_forcing")(Preset(schedule="self_forcing", names="causalforcing", window=21))
PRESETS.add(STOCK)(Preset(schedule="self_forcing", names="selfforcing", window=21))


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A preset and why it was taken."""

    name: str
    reason: str

    @property
    def preset(self) -> Preset:
        return PRESETS[self.name]


def choose_preset(asked: str, *, file_name: str = "", has_roles: bool = False) -> Choice:
    """Choose by hand (``asked``), or with ``auto`` by what is loaded: role LoRAs first, then the file's name.

    ``file_name`` may have folders in front. A checkpoint without role LoRAs never gets ``flashforward``: its quality
    comes from the roles.
    """
    if asked != "auto":
        _ = PRESETS[asked]  # an unknown name is refused
        return Choice(name=asked, reason="chosen by hand")
    if has_roles:
        return Choice(name=FLASHFORWARD, reason="planner or renderer LoRA loaded")
    for part in reversed(re.split(r"[/\\]", file_name.lower())):  # the file's own name, then its folders'
        plain = re.sub(r"[^a-z0-9]", "", part)
        for name in PRESETS:
            if name != FLASHFORWARD and re.search(PRESETS[name].names, plain):
                return Choice(name=name, reason=f"the file's name says {name}")
    return Choice(name=STOCK, reason="no role LoRAs, and a name that no preset knows; a causal model is assumed")


PLAN_MODES = ("auto", "manual")
"""Whether a plan follows the backbone's preset, or its own values to the letter."""


def fit_spec(spec: RolloutSpec, *, name: str, reason: str, mode: str = "auto") -> tuple[RolloutSpec, str]:
    """Return the rollout to run on a backbone whose preset is ``name``, and a sentence about it, or ''.

    With ``auto``, ``schedule='flashforward'`` (the default) on a backbone without FlashForward's roles becomes the
    backbone's preset; a schedule that was chosen stays. ``manual`` changes nothing. Where planner and renderer run
    without their roles, the sentence warns of it. An unknown name or mode raises ``ValueError``.
    """
    preset = PRESETS[name]
    if mode not in PLAN_MODES:
        raise ValueError(f"preset={mode!r} is unknown; use one of: {', '.join(PLAN_MODES)}")
    if name == FLASHFORWARD:
        return spec, ""
    if mode == "auto" and spec.schedule == FLASHFORWARD:
        said = f"preset {name} ({reason}): {preset.describe()}; flashforward needs role LoRAs"
        return preset.applied(spec), said
    if spec.anchors is not None:
        return spec, f"warning: {spec.schedule} without trained role LoRAs runs, but its quality needs them"
    return spec, ""
