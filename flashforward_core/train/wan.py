"""Wan 2.1 checkpoints in training: a folder in diffusers' layout, and prompts that are embedded once.

``FOLDER`` holds ``transformer``, ``vae``, ``text_encoder`` and ``tokenizer``, as Wan2.1-T2V-1.3B-Diffusers does.
"""

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from flashforward_core.graph.task import Role
from flashforward_core.model.checkpoints import load_checkpoint
from flashforward_core.model.transformer import CausalWanTransformer
from flashforward_core.train.export import replaced_whole, save_loras, save_transformer
from flashforward_core.train.folder import save_whole

log = logging.getLogger(__name__)

PARTS = ("transformer", "vae", "text_encoder", "tokenizer")
SHARD = "5GB"


def check_folder(folder: Path) -> None:
    """Raise ``ValueError`` for a folder that lacks a part."""
    for part in PARTS:
        if not (folder / part).is_dir():
            raise ValueError(
                f"wan={folder} has no folder {part}; name one in diffusers' layout, with {', '.join(PARTS)}"
            )


def load_transformer(folder: Path, *, frozen: bool) -> CausalWanTransformer:
    """Load the transformer to be trained: float32, or, when only its LoRAs will change, bfloat16.

    Weights that the file has in bfloat16 then stay in its mapping, which all processes of a machine share.
    """
    dtype = torch.bfloat16 if frozen else torch.float32
    model, report = load_checkpoint(folder / "transformer", dtype=dtype, mapped=frozen)
    log.info("%s", report)
    return model.requires_grad_(True).train()


class CachedPrompts(nn.Module):
    """Stands for the prompt encoder while training: embeddings by number, padded with zeros as Wan's pipeline does."""

    def __init__(self, embedded: dict[str, Tensor], *, text_len: int) -> None:
        """Take the embeddings [tokens, dim] by caption; ``""`` must be among them."""
        super().__init__()
        self._numbers = {caption: number for number, caption in enumerate(embedded)}
        self._embedded = list(embedded.values())
        self._text_len = text_len

    def tokenise(self, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return each caption's number [B, 1] and a mask of ones; an unknown caption raises ``KeyError``."""
        ids = torch.tensor([[self._numbers[caption]] for caption in captions])
        return ids, torch.ones_like(ids)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return embeddings [B, text_len, dim] on the device of ``ids``."""
        rows = [self._embedded[number] for number in ids[:, 0].tolist()]
        out = torch.zeros(len(rows), self._text_len, rows[0].shape[1])
        for padded, row in zip(out, rows, strict=True):
            padded[: len(row)] = row
        return out.to(ids.device)


@torch.no_grad()
def cached_prompts(
    folder: Path, captions: Sequence[str], *, text_len: int, cache: Path, device: torch.device
) -> CachedPrompts:
    """Embed the captions and the empty prompt with the folder's encoder, or read what was embedded before."""
    wanted = sorted({"", *captions})
    key = hashlib.sha256(json.dumps([str(folder.resolve()), text_len, wanted]).encode()).hexdigest()[:16]
    path = cache / f"prompts-{key}.safetensors"
    if not path.is_file():
        found = _embed(folder, wanted, text_len=text_len, device=device)
        save_whole({str(number): embedding for number, embedding in enumerate(found)}, path)
    kept = load_file(path)
    return CachedPrompts({caption: kept[str(n)] for n, caption in enumerate(wanted)}, text_len=text_len)


def _embed(folder: Path, captions: Sequence[str], *, text_len: int, device: torch.device) -> list[Tensor]:
    """Return each caption's embedding [tokens, dim] in bfloat16, without its padding."""
    from transformers import AutoTokenizer, UMT5EncoderModel

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer", local_files_only=True)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    encoder = UMT5EncoderModel.from_pretrained(folder / "text_encoder", local_files_only=True, torch_dtype=dtype)
    encoder = encoder.to(device).eval()
    found = []
    for caption in captions:
        tokens = tokenizer(caption, padding="max_length", max_length=text_len, truncation=True, return_tensors="pt").to(
            device
        )
        embedded = encoder(tokens.input_ids, tokens.attention_mask).last_hidden_state[0]
        found.append(embedded[: int(tokens.attention_mask.sum())].bfloat16().cpu().contiguous())
    return found


def export_wan(model: CausalWanTransformer, folder: Path, *, roles: Sequence[Role], frozen: bool) -> None:
    """Write the roles' LoRAs, and the transformer itself if it was trained, in diffusers' layout."""
    with replaced_whole(folder) as new:
        if not frozen:
            save_transformer(model, new / "transformer", shard=SHARD)
        base = f"wan2.1-{model.config.name}" if frozen else "the transformer beside it"
        save_loras(model, new, roles=roles, base=base)
