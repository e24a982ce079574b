"""A node for tests: what the engine holds of weights beyond the backbones' own."""

from flashforward_core.engine import replicas
from flashforward_core.engine.offload import HostBlock


class StandInMemory:
    """Shows how many copies there are once ``samples`` are, and the bytes of blocks that wait in host memory."""

    RETURN_TYPES = ()
    FUNCTION = "look"
    CATEGORY = "tests"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls) -> dict:
        return {"required": {"samples": ("LATENT",), "again": ("INT", {"default": 0})}}

    def look(self, samples: dict, again: int) -> dict:
        found = [replica for of_device in replicas._replicas.values() for replica in of_device.values()]
        models = {model for replica in found for model in replica.models.values()}
        blocks = {block for model in models for block in model.blocks if isinstance(block, HostBlock)}
        return {"ui": {"text": [str(len(found)), str(sum(block.num_bytes for block in blocks))]}}


NODE_CLASS_MAPPINGS = {"StandInMemory": StandInMemory}
