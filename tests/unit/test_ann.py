"""Approximate nearest keys: right where they must be, and as good as their bits allow."""

import pytest
import torch

from flashforward_core.kv.ann import buckets, nearest, quantise, recall, recall_by_bits
from flashforward_core.kv_policy import AnnOptions

pytestmark = pytest.mark.cpu


def _random(tokens: int, *, seed: int = 0, dim: int = 64) -> torch.Tensor:
    return torch.randn(1, tokens, 2, dim, generator=torch.Generator().manual_seed(seed))


def test_exact_finds_the_largest_product_written_out() -> None:
    q, k = _random(700), _random(90, seed=1)  # more queries than are compared at a time
    truth = torch.einsum("blhd,bnhd->blhn", q.double(), k.double()).argmax(dim=-1)
    assert torch.equal(nearest(q, k, options=AnnOptions(method="exact")), truth)


@pytest.mark.parametrize("options", [AnnOptions(), AnnOptions(method="signs", bits=128)])
def test_a_copy_of_a_key_finds_it(options: AnnOptions) -> None:
    """Its product with itself is |k|², near 64; with any other it is below 5 standard deviations of 8, so 40."""
    k = _random(200)
    assert torch.equal(nearest(k, k, options=options), torch.arange(200).view(1, -1, 1).expand(1, 200, 2))


def test_only_living_keys_are_found() -> None:
    k = _random(50)
    alive = torch.ones(1, 50, 2, dtype=torch.bool)
    alive[:, 10:, 1] = False
    found = nearest(k, k, options=AnnOptions(), alive_BNH=alive)
    assert found[..., 0].flatten().tolist() == list(range(50))
    assert found[:, :, 1].max() < 10


def test_what_all_keys_share_does_not_disturb() -> None:
    """An offset common to all keys moves every product of a query by the same amount."""
    q, k = _random(300), _random(300, seed=1)
    for method, bits in (("quantised", 4), ("signs", 64)):
        options = AnnOptions(method=method, bits=bits)
        assert recall(q, k + 30, options=options) >= recall(q, k, options=options) - 0.02  # rounding decides near ties


def test_eight_bits_reproduce_values_to_half_a_step() -> None:
    x = _random(20)
    codes, scale = quantise(x, bits=8)
    assert codes.abs().max() == 127
    assert torch.equal(codes, codes.round())
    assert ((codes * scale.unsqueeze(-1) - x).abs() <= scale.unsqueeze(-1) * 0.5001).all()
    assert torch.equal(quantise(torch.zeros(1, 4), bits=8)[0], torch.zeros(1, 4))


def test_recall_rises_with_the_bits() -> None:
    """On Gaussian keys, the hardest case: nothing is near. 8 bits err by 1/254 of a row's range, far below the gaps."""
    q, k = _random(400), _random(400, seed=1)
    quantised = recall_by_bits(q, k, method="quantised", bits=(2, 4, 6, 8))
    signs = recall_by_bits(q, k, method="signs", bits=(16, 64, 256))
    assert list(quantised.values()) == sorted(quantised.values())
    assert quantised[8] > 0.9
    assert list(signs.values()) == sorted(signs.values())
    assert signs[256] > 10 * (1 / 400)  # chance


def test_buckets_say_on_which_side_of_the_planes_a_token_lies() -> None:
    x = _random(500)
    found = buckets(x, planes=4, seed=3)
    assert found.min() >= 0
    assert found.max() == 15
    assert torch.equal(buckets(2 * x, planes=4, seed=3), found)  # only the direction counts
    assert torch.equal(buckets(-x, planes=4, seed=3), 15 - found)
    assert not torch.equal(buckets(x, planes=4, seed=4), found)


@pytest.mark.parametrize(("method", "bits"), [("quantised", 1), ("quantised", 9), ("signs", 0)])
def test_bits_out_of_range_are_refused(method: str, bits: int) -> None:
    with pytest.raises(ValueError, match=rf"bits={bits} does not suit method='{method}'; use "):
        AnnOptions(method=method, bits=bits)


def test_an_unknown_method_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"ann method='tree' is unknown; use one of: exact, quantised, signs"):
        AnnOptions(method="tree")
