"""A node for tests: a random prompt embedding, since ComfyUI's Wan text encoder has no small stand-in."""

import torch


class StandInPrompt:
    """CONDITIONING [1, 12, width] that the text decides."""

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "make"
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls) -> dict:
        return {"required": {"text": ("STRING", {}), "width": ("INT", {"default": 4096})}}

    def make(self, text: str, width: int) -> tuple:
        generator = torch.Generator().manual_seed(sum(text.encode()))
        return ([[torch.randn(1, 12, width, generator=generator), {}]],)


NODE_CLASS_MAPPINGS = {"StandInPrompt": StandInPrompt}
