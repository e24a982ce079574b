"""Videos that are measured in a batch give what each of them gives alone."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from flashforward_core.metrics import Layout, evaluate
from flashforward_core.metrics.batched import BatchedProbe, _median_of_bytes, _median_place
from flashforward_core.metrics.numbers import METRICS, numbers
from flashforward_core.scenes import SceneWords, parse_caption, sample_scene
from flashforward_core.train.synthetic import render_scene

pytestmark = pytest.mark.cpu


def drawn(seed: int, frames: int, *, noise: float) -> tuple[SceneWords, Tensor]:
    """Return what a scene's caption says and its frames [F, H, W, 3], uint8, as a decoder would blur them."""
    scene = sample_scene(seed)
    video = render_scene(scene, frames)[0] + noise * torch.randn(3, frames, 128, 192)
    words = parse_caption(scene.caption)
    assert words is not None
    return words, ((video + 1) * 127.5).round().clamp(0, 255).byte().permute(1, 2, 3, 0)


def batched(words: Sequence[SceneWords], videos: Tensor, *, pieces: Sequence[int]) -> BatchedProbe:
    probe = BatchedProbe(words, device="cpu")
    for piece in videos.split(list(pieces), dim=1):
        probe(piece)
    return probe


@pytest.mark.parametrize(("frames", "pieces"), [(81, (1, 32, 48)), (5, (5,))])
def test_a_batch_gives_what_each_video_gives_alone(frames: int, pieces: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    words, videos = zip(*(drawn(seed, frames, noise=0.1) for seed in (1_000_003, 1_000_004, 1_000_008)), strict=True)
    assert {len(w.movers) for w in words} == {1, 2}  # captions of either sort share a batch
    found = batched(words, torch.stack(videos), pieces=pieces).report()
    for measured, scene, video in zip(found, words, videos, strict=True):
        alone = evaluate([video.numpy()], scene=scene, layout=Layout())
        expected, ours = numbers(alone), numbers(measured.evaluation)
        assert ours.keys() == expected.keys()
        assert ours.keys() <= set(METRICS)
        for name, value in expected.items():
            # float32 sums in another order; a pixel at a threshold may fall on the other side
            assert ours[name] == pytest.approx(value, rel=1e-4, abs=2e-4), name
        np.testing.assert_allclose(measured.evaluation.series.change, alone.series.change, rtol=1e-5)
        np.testing.assert_allclose(measured.palette_error.mean(), expected["palette_error"], rtol=1e-6)


def test_what_a_video_shows_counts_for_that_video_alone() -> None:
    words, video = drawn(1_000_003, 41, noise=0.0)
    other, _ = drawn(1_000_008, 1, noise=0.0)
    right, wrong = batched([words, other], torch.stack((video, video)), pieces=(41,)).report()
    assert right.evaluation.scene is not None and wrong.evaluation.scene is not None
    assert right.evaluation.scene.faithfulness == 1.0
    assert wrong.evaluation.scene.faithfulness < 0.7
    assert wrong.palette_error.mean() > 5 * right.palette_error.mean()


@pytest.mark.parametrize("count", [1, 2, 7, 8])
def test_medians_are_numpy_s(count: int) -> None:
    rng = np.random.default_rng(count)
    values = rng.integers(0, 256, (50, count), dtype=np.uint8)
    np.testing.assert_array_equal(_median_of_bytes(torch.from_numpy(values)).numpy(), np.median(values, axis=1))
    places = rng.integers(0, 9, (50, count))
    counts = np.stack([np.bincount(row, minlength=9) for row in places])
    np.testing.assert_array_equal(_median_place(torch.from_numpy(counts)).numpy(), np.median(places, axis=1))


def test_another_size_and_a_single_frame_are_refused() -> None:
    words, video = drawn(1_000_003, 1, noise=0.0)
    probe = BatchedProbe([words], device="cpu")
    with pytest.raises(ValueError, match="size=64x64 is not that of procedural scenes; use 192x128"):
        probe(torch.zeros(1, 1, 64, 64, 3, dtype=torch.uint8))
    probe(video.unsqueeze(0))
    with pytest.raises(ValueError, match="has 1 frames"):
        probe.report()
