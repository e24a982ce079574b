"""Anchors one can hold: replace one from a picture or latents, lock it, or plan it again from another seed."""

from typing import Any

import torch
from comfy_api.latest import io
from torch import Tensor

from flashforward_core.engine.rollout import Anchors, reseed
from flashforward_core.model.roles import Backbone
from flashforward_core.specs import TEMPORAL_FACTOR

from .bridge import from_latent
from .events import check_cancel, show_text
from .pictures import encode_pictures
from .planning import MAX_SECONDS
from .sockets import CATEGORY, MAX_SEED, AnchorsSocket

STILL_LATENTS = 4  # a still is encoded as this many latent frames, after which the encoder has nearly settled
KEEP_SEED = -1


def still_latent(image: Tensor, anchors: Anchors, *, position: int, vae: Any) -> Tensor:
    """Encode one picture [1, H, W, 3] as the normalised latent frame [1, 16, h, w] at ``position`` of a video.

    The first latent frame stands for one video frame, each later one for four with a past: there the picture stands
    still for a while first. The picture is scaled and cropped to the plan's size.
    """
    if image.shape[0] != 1:
        raise ValueError(f"image holds {image.shape[0]} pictures; connect one")
    frames = image.expand(1 + (TEMPORAL_FACTOR * STILL_LATENTS if position else 0), -1, -1, -1)
    backbone = _backbone(anchors)
    return encode_pictures(frames, name="image", shape=anchors.spec.shape, backbone=backbone, vae=vae)[:, :, -1]


def latent_at(samples: dict[str, Tensor], anchors: Anchors, *, index: int) -> Tensor:
    """Take the normalised latent frame [1, 16, h, w] for an anchor out of a LATENT.

    It may hold one latent frame, one per anchor, or one per latent frame of the video; other lengths raise
    ``ValueError``.
    """
    latents = from_latent(samples, _backbone(anchors))
    places = {1: 0, len(anchors.positions): index, anchors.spec.shape.latent_frames: anchors.positions[index]}
    found = latents.shape[2]
    if found not in places:
        raise ValueError(
            f"samples has {found} latent frames; use 1, {len(anchors.positions)} (one per anchor) or "
            f"{anchors.spec.shape.latent_frames} (the whole video)"
        )
    return latents[:, :, 0 if found == 1 else places[found]]


def _backbone(anchors: Anchors) -> Backbone:
    if anchors.planner is None:
        raise ValueError("anchors come from no planner; connect Plan Anchors")
    return anchors.planner.backbone


def changed(
    anchors: Anchors, index: int, *, image: Tensor | None, samples: dict[str, Tensor] | None, vae: Any, seed: int
) -> tuple[Anchors, str]:
    """Return anchors with one replaced, and where it comes from in words; with nothing connected it stays."""
    sources = [image is not None, samples is not None, seed != KEEP_SEED]
    if sum(sources) > 1:
        raise ValueError("use only one of image, samples and reseed: each of them replaces the anchor")
    if image is not None:
        latent = still_latent(image, anchors, position=anchors.positions[index], vae=vae)
        return anchors.with_latent(index, latent), "from the picture"
    if samples is not None:
        return anchors.with_latent(index, latent_at(samples, anchors, index=index)), "from samples"
    if seed != KEEP_SEED:
        return reseed(anchors, index, seed=seed, check_cancel=check_cancel), f"planned again with seed {seed}"
    return anchors, "as it was"


class SetAnchor(io.ComfyNode):
    """Replace, reseed or lock one anchor."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FlashForwardSetAnchor",
            display_name="Set Anchor",
            category=CATEGORY,
            description="Replaces one anchor, the one nearest to a time, by a picture, by latents or by another try of "
            "the planner. All other anchors stay, and the next render runs only what depends on the change.",
            inputs=[
                AnchorsSocket.Input("anchors", tooltip="From Plan Anchors or another Set Anchor."),
                io.Float.Input(
                    "seconds",
                    default=0.0,
                    min=0.0,
                    max=MAX_SECONDS,
                    step=0.25,
                    tooltip="A time in the video; the nearest anchor is meant, and the node says which.",
                ),
                io.Boolean.Input(
                    "lock",
                    default=True,
                    tooltip="Whether the anchor stays as it is when Plan Anchors plans the others again around it.",
                ),
                io.Image.Input("image", optional=True, tooltip="A picture to use; scaled and cropped to the size."),
                io.Latent.Input(
                    "samples",
                    optional=True,
                    tooltip="Latents to use: one frame, another Plan Anchors' samples, or a whole rendered video.",
                ),
                io.Vae.Input(
                    "vae", optional=True, tooltip="Encodes the picture; the embedded backbone brings its own."
                ),
                io.Int.Input(
                    "reseed",
                    default=KEEP_SEED,
                    min=KEEP_SEED,
                    max=MAX_SEED,
                    optional=True,
                    tooltip="Another seed for this anchor alone, which is then planned again; -1 leaves it.",
                ),
            ],
            outputs=[AnchorsSocket.Output("anchors_out", display_name="anchors", tooltip="For Wavefront Render.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls,
        *,
        anchors: Anchors,
        seconds: float,
        lock: bool,
        image: Tensor | None = None,
        samples: dict[str, Tensor] | None = None,
        vae: Any = None,
        reseed: int = KEEP_SEED,
    ) -> io.NodeOutput:
        index = anchors.nearest(seconds)
        with torch.inference_mode():
            after, source = changed(anchors, index, image=image, samples=samples, vae=vae, seed=reseed)
        text = (
            f"anchor {index + 1} of {len(anchors.positions)} at {anchors.seconds(index):.2f} s (latent frame "
            f"{anchors.positions[index]}): {source}, {'locked' if lock else 'not locked'}"
        )
        show_text(text, node_id=cls.hidden.unique_id)
        return io.NodeOutput(after.with_lock(index, lock), ui={"text": [text]})
