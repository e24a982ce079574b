"""Sizes of the Wan transformers that the engine runs. Nothing here imports torch: the simulator reads it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PATCH = (1, 2, 2)  # latent frames, rows and columns per token; every Wan 2.1 model
ROPE_THETA = 10_000.0
MOST_LAYERS = 1000
LARGEST = 1 << 20  # no width or count of a model that exists comes near it


@dataclass(frozen=True, slots=True, kw_only=True)
class WanConfig:
    """One Wan 2.1 text-to-video transformer. Source: the public Wan2.1 repository."""

    name: str
    """A key of ``MODELS`` or ``custom``; used in reports only."""
    dim: int
    """Width of a token."""
    ffn_dim: int
    """Hidden width of the feed-forward layers."""
    num_heads: int
    """Attention heads; each is dim / num_heads wide."""
    num_layers: int
    """Transformer blocks."""
    text_dim: int = 4096
    """Width of a prompt embedding's rows."""
    text_len: int = 512
    """Rows of a prompt embedding, zero-padded; all of them are attended."""
    freq_dim: int = 256
    """Width of the timestep's sinusoid."""
    channels: int = 16
    """Latent channels, in and out."""
    eps: float = 1e-6
    """Added to the variance in every norm."""

    def __post_init__(self) -> None:
        names = ("dim", "ffn_dim", "num_heads", "num_layers", "text_dim", "text_len", "freq_dim", "channels")
        for name in names:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is below 1; use a positive {name}")
        if self.dim % self.num_heads or self.head_dim % 2 or self.head_dim < 6:
            raise ValueError(
                f"dim={self.dim} does not give num_heads={self.num_heads} heads an even width of 6 or more; "
                f"use dim={self.num_heads * max(6, self.head_dim + self.head_dim % 2)}"
            )
        if self.freq_dim % 2:
            raise ValueError(f"freq_dim={self.freq_dim} is odd; use freq_dim={self.freq_dim + 1}")

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    @property
    def rope_pairs(self) -> tuple[int, int, int]:
        """Rotary pairs of a head for time, height and width; together head_dim / 2."""
        side = self.head_dim // 6
        return self.head_dim // 2 - 2 * side, side, side

    def kv_bytes_per_frame(self, tokens: int, *, element_bytes: int = 2) -> int:
        """Bytes of one latent frame's keys and values over all blocks, at ``tokens`` per latent frame."""
        return 2 * self.num_layers * self.dim * tokens * element_bytes

    def to_diffusers(self) -> dict[str, Any]:
        """Return the ``config.json`` of diffusers' WanTransformer3DModel, plus ``text_len`` of our own."""
        return {
            "_class_name": "WanTransformer3DModel",
            "patch_size": list(PATCH),
            "num_attention_heads": self.num_heads,
            "attention_head_dim": self.head_dim,
            "in_channels": self.channels,
            "out_channels": self.channels,
            "text_dim": self.text_dim,
            "freq_dim": self.freq_dim,
            "ffn_dim": self.ffn_dim,
            "num_layers": self.num_layers,
            "cross_attn_norm": True,
            "qk_norm": "rms_norm_across_heads",
            "eps": self.eps,
            "image_dim": None,
            "added_kv_proj_dim": None,
            "rope_max_seq_len": 1024,
            "text_len": self.text_len,
        }

    @classmethod
    def from_diffusers(cls, config: Mapping[str, Any], *, name: str = "custom") -> "WanConfig":
        """Read a diffusers ``config.json``; anything but a 16-channel Wan 2.1 T2V model raises ``ValueError``."""
        refuse_other_models(
            channels=config["in_channels"],
            image=config.get("image_dim") is not None or config.get("added_kv_proj_dim") is not None,
            vace="vace_layers" in config,
        )
        patch = config.get("patch_size", PATCH)
        if not isinstance(patch, list | tuple) or tuple(patch) != PATCH:
            raise ValueError(f"backbone has patch_size={patch}; use a Wan 2.1 model, whose patch_size is {PATCH}")
        heads = whole(config, "num_attention_heads")
        return cls(
            name=name,
            dim=heads * whole(config, "attention_head_dim"),
            ffn_dim=whole(config, "ffn_dim"),
            num_heads=heads,
            num_layers=whole(config, "num_layers", most=MOST_LAYERS),
            text_dim=whole(config, "text_dim"),
            text_len=whole({"text_len": 512, **config}, "text_len"),
            freq_dim=whole(config, "freq_dim"),
            channels=config["in_channels"],
            eps=number(config, "eps"),
        )


def whole(config: Mapping[str, Any], name: str, *, most: int = LARGEST) -> int:
    """Read a whole number from 1 to ``most``; anything else raises ``ValueError``, a missing one ``KeyError``."""
    found = config[name]
    if type(found) is not int or not 1 <= found <= most:
        raise ValueError(f"{name}={found!r:.40} is no whole number from 1 to {most}; restore the model's own config")
    return found


def number(config: Mapping[str, Any], name: str) -> float:
    """Read a finite number above 0; anything else raises ``ValueError``, a missing one ``KeyError``."""
    found = config[name]
    if type(found) not in (int, float) or not 0 < found < math.inf:
        raise ValueError(f"{name}={found!r:.40} is no finite number above 0; restore the model's own config")
    return float(found)


def refuse_other_models(*, channels: int, image: bool, vace: bool) -> None:
    """Raise ``ValueError`` that names the model when it is not a 16-channel Wan 2.1 text-to-video transformer.

    ``channels`` is the number of input channels; ``image`` tells of layers for a conditioning image.
    """
    found = None
    if vace:
        found = "a VACE model"
    elif channels == 48:
        found = "Wan 2.2 5B (48 latent channels)"
    elif channels == 36 or image:
        found = "an image-to-video (I2V) model"
    elif channels != 16:
        found = f"a model with {channels} input channels"
    if found:
        raise ValueError(f"backbone is {found}; use a 16-channel Wan 2.1 text-to-video model")


EMBEDDED = WanConfig(name="embedded", dim=256, ffn_dim=768, num_heads=4, num_layers=8, text_dim=128, text_len=128)
WAN_1_3B = WanConfig(name="1.3B", dim=1536, ffn_dim=8960, num_heads=12, num_layers=30)
WAN_14B = WanConfig(name="14B", dim=5120, ffn_dim=13824, num_heads=40, num_layers=40)

MODELS = {config.name: config for config in (EMBEDDED, WAN_1_3B, WAN_14B)}
