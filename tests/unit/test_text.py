"""The byte-level text encoder: spelling, padding, and files."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashforward_core.model.text import ByteT5Encoder, TextConfig, byte_ids

pytestmark = pytest.mark.cpu

PROMPTS = ["a red ball bounces", "noon"]


@pytest.fixture(scope="module")
def encoder() -> ByteT5Encoder:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return ByteT5Encoder(TextConfig(text_len=32)).eval()


def test_spelling_is_byt5s() -> None:
    from transformers import ByT5Tokenizer

    texts = ["a red ball", "", "dusk über 山"]
    ids, mask = byte_ids(texts, 24)
    theirs = ByT5Tokenizer()(texts, padding="max_length", max_length=24)
    assert ids.tolist() == theirs["input_ids"]
    assert mask.long().tolist() == theirs["attention_mask"]


def test_rows_past_the_prompt_are_zeros_and_the_others_are_not(encoder: ByteT5Encoder) -> None:
    rows = encoder.encode(PROMPTS)
    assert rows.shape == (2, 32, 128)
    for prompt, embedding in zip(PROMPTS, rows, strict=True):
        used = len(prompt) + 1
        assert torch.count_nonzero(embedding[used:]) == 0
        assert (embedding[:used].abs().sum(-1) > 0).all()


def test_a_prompt_does_not_depend_on_its_neighbours(encoder: ByteT5Encoder) -> None:
    alone = torch.cat([encoder.encode([prompt]) for prompt in PROMPTS])
    # float32 products of another batch size
    torch.testing.assert_close(encoder.encode(PROMPTS), alone, rtol=1e-5, atol=1e-6)


def test_padding_is_not_attended(encoder: ByteT5Encoder) -> None:
    ids, mask = byte_ids(["noon"], 32)
    with torch.no_grad():
        padded = encoder(ids, mask)[:, :5]
        bare = encoder(ids[:, :5], mask[:, :5])
    torch.testing.assert_close(padded, bare, rtol=1e-5, atol=1e-6)  # float32 sums of another length


def test_long_prompt_is_cut_with_one_warning_that_keeps_it_secret(
    encoder: ByteT5Encoder, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "zebra" * 20
    with caplog.at_level(logging.WARNING):
        rows = encoder.encode([secret])
    assert torch.equal(rows, encoder.encode([secret[:31]]))
    assert len(caplog.records) == 1
    assert "100 bytes" in caplog.text and "first 31" in caplog.text and "zebra" not in caplog.text


def test_created_encoders_fit_their_transformer() -> None:
    made = ByteT5Encoder.create(text_len=16, text_dim=64)
    assert made.encode(PROMPTS).shape == (2, 16, 64)


def test_gradients_reach_every_weight(encoder: ByteT5Encoder) -> None:
    encoder.zero_grad()
    encoder(*byte_ids(PROMPTS, 32)).square().mean().backward()
    for name, parameter in encoder.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
    encoder.zero_grad()


def test_saved_encoder_loads_here_and_in_transformers(encoder: ByteT5Encoder, tmp_path: Path) -> None:
    from transformers import T5EncoderModel

    encoder.save(tmp_path)
    expected = encoder.encode(PROMPTS)
    assert torch.equal(ByteT5Encoder.load(tmp_path).encode(PROMPTS), expected)
    theirs = T5EncoderModel.from_pretrained(tmp_path, local_files_only=True)
    ids, mask = byte_ids(PROMPTS, 32)
    with torch.no_grad():
        rows = theirs(input_ids=ids, attention_mask=mask.long()).last_hidden_state
    assert torch.equal(rows * mask.unsqueeze(-1), expected)


def test_missing_and_wrong_files_name_themselves(encoder: ByteT5Encoder, tmp_path: Path) -> None:
    encoder.save(tmp_path)
    other = tmp_path / "other"
    ByteT5Encoder(TextConfig(num_layers=1, text_len=32)).save(other)
    (tmp_path / "config.json").write_text((other / "config.json").read_text())
    with pytest.raises(ValueError, match=r"model\.safetensors does not fit"):
        ByteT5Encoder.load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors is missing"):
        ByteT5Encoder.load(tmp_path)


def test_importing_the_module_is_quiet_and_does_not_import_transformers() -> None:
    code = "import sys, flashforward_core.model.text; assert 'transformers' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_sizes_that_cannot_work_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="text_len=0 is no whole number from 1"):
        TextConfig(text_len=0)
