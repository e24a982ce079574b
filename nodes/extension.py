"""The list of nodes that ComfyUI shows."""

from comfy_api.latest import ComfyExtension, io

from .loading import EncodePrompt, LoadBackbone
from .planning import Plan, PlanAnchors
from .rendering import Render
from .video import DecodeVideo


class FlashForwardExtension(ComfyExtension):
    """Everything that the pack adds."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [LoadBackbone, EncodePrompt, Plan, PlanAnchors, Render, DecodeVideo]
