"""LoRAs on a backbone."""

import logging
from typing import Any

from comfy_api.latest import io

from flashforward_core.graph.task import Role
from flashforward_core.model.adapters import apply_lora
from flashforward_core.model.roles import Backbone

from .events import show_text
from .model_files import lora_names, lora_path, stamp
from .roles import fits_again
from .sockets import CATEGORY, BackboneSocket, expert

log = logging.getLogger(__name__)
BOTH = "both"


class ApplyLoRA(io.ComfyNode):
    """Put a LoRA on one role or both."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FlashForwardApplyLoRA",
            display_name="Apply LoRA",
            category=CATEGORY,
            description="Puts a LoRA for Wan 2.1 on the backbone and says how much of the file matched. LoRAs of every "
            "common layout work (kohya, PEFT, diffusers, ComfyUI); stack them by chaining nodes.",
            inputs=[
                BackboneSocket.Input("backbone", tooltip="The model; it stays as it is for other nodes."),
                io.Combo.Input("lora", options=lora_names(), tooltip="A file of models/loras."),
                io.Float.Input(
                    "strength", default=1.0, min=-20.0, max=20.0, step=0.05, tooltip="How strongly it is applied."
                ),
                io.Combo.Input(
                    "role",
                    options=[BOTH, *Role],
                    default=BOTH,
                    tooltip="Whom it is for: the planner draws the anchors, the renderer the video. Styles: both.",
                ),
                expert(
                    io.Combo,
                    "mode",
                    options=["auto", "merged", "unmerged"],
                    default="auto",
                    optional=True,
                    tooltip="merged: into a copy of the weights, fastest. unmerged: beside the weights, which are "
                    "shared. auto: merged where a second copy fits.",
                ),
            ],
            outputs=[
                BackboneSocket.Output("model", display_name="backbone", tooltip="The model with the LoRA."),
                io.String.Output("report", display_name="report", tooltip="How much of the file matched."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, lora: str | None = None) -> bool:
        if lora is not None:
            lora_path(lora, field="lora")
        return True

    @classmethod
    def fingerprint_inputs(cls, *, lora: str | None = None, **inputs: Any) -> str:
        """Change when the file does."""
        return "" if lora is None else stamp(lora_path(lora, field="lora"))

    @classmethod
    def execute(cls, *, backbone: Backbone, lora: str, strength: float, role: str, mode: str = "auto") -> io.NodeOutput:
        merged = mode == "merged" or (mode == "auto" and fits_again(backbone))
        roles = tuple(Role) if role == BOTH else (Role(role),)
        path = lora_path(lora, field="lora")
        made, found = apply_lora(backbone, path, strength=strength, roles=roles, merged=merged)
        log.info("%s, strength %g on %s, %s", found.report, strength, role, "merged" if merged else "unmerged")
        show_text(found.report, node_id=cls.hidden.unique_id)
        return io.NodeOutput(made, found.report, ui={"text": [found.report]})
