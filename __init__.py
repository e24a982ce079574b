"""ComfyUI's entry point to the pack."""

WEB_DIRECTORY = "./web"


async def comfy_entrypoint():  # type: ignore[no-untyped-def]  # noqa: ANN201 (ComfyUI's types are not ours to check)
    """Give ComfyUI the pack's nodes."""
    from .nodes import FlashForwardExtension

    return FlashForwardExtension()
