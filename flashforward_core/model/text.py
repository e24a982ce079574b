"""Prompts to embeddings: a small T5 encoder over bytes, as ByT5 reads text.

The transformer takes a fixed number of rows and attends to all of them, so rows past the prompt's end are zeros.
Everything is local: there is no vocabulary file and nothing is fetched.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .config import whole

logger = logging.getLogger(__name__)

PAD, END = 0, 1
BYTE_OFFSET = 3  # after pad, end and unknown
VOCABULARY = 384  # 3 special ids, 256 bytes and ByT5's 125 sentinels

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextConfig:
    """Size of the text encoder; the defaults are the embedded model's."""

    d_model: int = 128
    """Width of an embedding row (the transformer's text_dim)."""
    d_kv: int = 32
    """Width of a head."""
    d_ff: int = 256
    """Hidden width of the gated feed-forward layers."""
    num_heads: int = 4
    num_layers: int = 2
    text_len: int = 128
    """Rows of a prompt embedding: bytes of the longest prompt, plus one end mark."""

    def __post_init__(self) -> None:
        for name in asdict(self):
            whole(asdict(self), name)


def byte_ids(prompts: Sequence[str], text_len: int) -> tuple[Tensor, Tensor]:
    """Spell prompts as ids [B, text_len] (byte + 3, then the end mark, then padding) and their mask.

    A prompt that is too long loses its last bytes, with one logged warning that does not show the prompt.
    """
    ids = torch.full((len(prompts), text_len), PAD)
    for row, prompt in enumerate(prompts):
        data = prompt.encode()
        if len(data) >= text_len:
            logger.warning("a prompt has %d bytes; only the first %d are used", len(data), text_len - 1)
            data = data[: text_len - 1]
        spelled = [byte + BYTE_OFFSET for byte in data] + [END]
        ids[row, : len(spelled)] = torch.tensor(spelled)
    return ids, ids != PAD


class ByteT5Encoder(nn.Module):
    """transformers' ``T5EncoderModel`` over bytes. ``forward`` is differentiable, for joint training."""

    def __init__(self, config: TextConfig | None = None) -> None:
        super().__init__()
        from transformers import T5Config, T5EncoderModel  # slow to import, and few runs need it

        self.config = config or TextConfig()
        self.t5 = T5EncoderModel(T5Config(**_t5_settings(self.config)))

    @classmethod
    def create(cls, *, text_len: int, text_dim: int) -> "ByteT5Encoder":
        """Make a new encoder, with random weights, for a transformer of this ``text_len`` and ``text_dim``."""
        return cls(TextConfig(text_len=text_len, d_model=text_dim))

    def tokenise(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Spell prompts for ``forward``: ids and mask, both [B, text_len] on the CPU (``byte_ids``)."""
        return byte_ids(prompts, self.config.text_len)

    def forward(self, ids_BL: Tensor, mask_BL: Tensor) -> Tensor:
        """Embed ids [B, L] to [B, L, d_model]; only bytes under the mask are attended, other rows are zeros."""
        rows = self.t5(input_ids=ids_BL, attention_mask=mask_BL.long()).last_hidden_state
        return rows * mask_BL.unsqueeze(-1)

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Tensor:
        """Embed prompts to [B, text_len, d_model] on the encoder's device, zeros past each prompt's end mark."""
        device = self.t5.shared.weight.device
        ids, mask = self.tokenise(prompts)
        return self(ids.to(device), mask.to(device))

    def save(self, folder: Path) -> None:
        """Write ``config.json`` and ``model.safetensors``, which transformers' ``T5EncoderModel`` reads too."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        settings = {**_t5_settings(self.config), "architectures": ["T5EncoderModel"], "text_len": self.config.text_len}
        (folder / CONFIG_FILE).write_text(json.dumps({"model_type": "t5", **settings}, indent=2) + "\n")
        weights = {name: value.contiguous() for name, value in self.t5.state_dict().items() if not _is_tied(name)}
        save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})

    @classmethod
    def load(cls, folder: Path) -> "ByteT5Encoder":
        """Read a saved encoder in float32, in evaluation mode. Raises ``ValueError`` naming a missing or wrong file."""
        from safetensors.torch import load_file

        for name in (CONFIG_FILE, WEIGHTS_FILE):
            if not (folder / name).is_file():
                raise ValueError(
                    f"text encoder {folder / name} is missing; restore it or train the embedded model again"
                )
        data = json.loads((folder / CONFIG_FILE).read_text())
        missing = [name for name in TextConfig.__dataclass_fields__ if name not in data]
        if missing:
            raise ValueError(f"{folder / CONFIG_FILE} lacks {', '.join(missing)}; it is no byte-level text encoder")
        try:
            encoder = cls(TextConfig(**{name: data[name] for name in TextConfig.__dataclass_fields__}))
        except ValueError as error:
            raise ValueError(f"{folder / CONFIG_FILE}: {error}") from None
        weights = load_file(folder / WEIGHTS_FILE)
        try:
            absent, unknown = encoder.t5.load_state_dict(weights, strict=False)
        except RuntimeError:  # misshapen tensors
            absent, unknown = [], ["shapes"]
        if unknown or [name for name in absent if not _is_tied(name)]:
            raise ValueError(f"{folder / WEIGHTS_FILE} does not fit its {CONFIG_FILE}; take both from one model")
        return encoder.eval()


def _is_tied(name: str) -> bool:
    """Whether it is the second name of the byte embedding ``shared.weight``."""
    return name == "encoder.embed_tokens.weight"


def _t5_settings(config: TextConfig) -> dict[str, Any]:
    sizes = {name: value for name, value in asdict(config).items() if name != "text_len"}
    return {
        **sizes,
        "vocab_size": VOCABULARY,
        "feed_forward_proj": "gated-gelu",
        "dropout_rate": 0.0,
        "pad_token_id": PAD,
        "eos_token_id": END,
        "is_encoder_decoder": False,
        "use_cache": False,
    }
