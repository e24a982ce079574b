"""The list of nodes that ComfyUI shows."""

from comfy_api.latest import ComfyExtension, io

from . import routes
from .anchors import SetAnchor
from .checks import checked
from .devices import Devices
from .loading import EncodePrompt, LoadBackbone
from .lora import ApplyLoRA
from .native import BackboneFromModel
from .planning import Plan, PlanAnchors
from .policies import KVPolicyNode
from .prompts import PromptSchedule
from .rendering import Render
from .rendering_video import RenderVideo
from .report import Report
from .video import DecodeVideo


class FlashForwardExtension(ComfyExtension):
    """Everything that the pack adds."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        routes.register()  # here, since ComfyUI 0.3.75 does not call on_load
        nodes = [
            LoadBackbone,
            BackboneFromModel,
            ApplyLoRA,
            EncodePrompt,
            PromptSchedule,
            Plan,
            PlanAnchors,
            SetAnchor,
            Devices,
            KVPolicyNode,
            Render,
            RenderVideo,
            DecodeVideo,
            Report,
        ]
        return [checked(node) for node in nodes]
