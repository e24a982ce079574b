"""No length is the last: positions come from no table."""

from typing import Any

import pytest
import torch

from flashforward_core.graph.task import Role

pytestmark = pytest.mark.cpu


def test_what_lies_an_hour_in_is_computed_as_at_the_start(rig: Any) -> None:
    """Attention sees distances in time alone, so a clip may begin at any latent frame.

    In float64 the rotation by 14,400 turns differs by 1e-12; Wan's own table ends at 1024.
    """
    model = rig.model(torch.float64)
    (text,) = rig.texts(torch.float64, count=1)
    x_BCFHW = torch.randn(1, 16, 4, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def velocity(start: int) -> torch.Tensor:
        return model(
            x_BCFHW,
            timestep_BF=torch.full((1, 4), 500.0, dtype=torch.float64),
            text=model.text_context(text, Role.RENDERER),
            frames=torch.arange(start, start + 4),
            role=Role.RENDERER,
        )

    with torch.inference_mode():
        near, far = velocity(0), velocity(14_400)
    torch.testing.assert_close(far, near, rtol=0, atol=1e-8)
