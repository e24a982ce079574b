"""ComfyUI's entry point to the pack."""

WEB_DIRECTORY = "./web"


async def comfy_entrypoint() -> object:
    """Give ComfyUI the pack's nodes."""
    from .nodes import FlashForwardExtension

    return FlashForwardExtension()
