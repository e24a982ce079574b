"""KV Policy through the real server: it reaches the render, and settings that cannot work are refused by name."""

from typing import Any

import pytest
from comfy_client import Client, RunError

from .conftest import change

pytestmark = pytest.mark.cpu
Json = dict[str, Any]


def with_policy(prompt: Json, **values: Any) -> Json:
    """Connect a KV Policy node to the plan of a prompt."""
    settings = {"budget_frames": 9, "sink_frames": 3, "future_weight": 0.5, "threshold": 0.9, **values}
    prompt["900"] = {"class_type": "FlashForwardKVPolicy", "inputs": settings}
    return change(prompt, "FlashForwardPlan", kv_policy=["900", 0])


def test_only_a_policy_that_removes_something_changes_the_video(client: Client, latents: Json) -> None:
    """9 latents are 3 chunks: the last one looks back at 6."""
    plain = client.run(latents).sha256()
    kept = client.run(with_policy(latents, policy="window", budget_frames=9)).sha256()
    less = client.run(with_policy(latents, policy="window", budget_frames=4)).sha256()
    assert kept == plain
    assert less != plain


def test_a_budget_that_leaves_no_choice_is_refused(client: Client, latents: Json) -> None:
    prompt = with_policy(latents, policy="future_forcing", budget_frames=6)
    with pytest.raises(RunError, match=r"budget_frames=6 leaves no choice beside 3 sink and 3 recent frames"):
        client.run(prompt)
