"""The store keeps within its budget, drops the longest unused first, and keeps all or nothing of what it is given."""

import pytest
import torch

from flashforward_core.store import SlotStore

pytestmark = pytest.mark.cpu

VALUE = torch.zeros(4)  # 16 bytes


def test_the_longest_unused_go_first() -> None:
    store = SlotStore()
    for key in "abc":
        assert store.put({key: VALUE}, budget_bytes=48)
    store.take("a")
    assert store.put({"d": VALUE}, budget_bytes=48)
    assert [key in store for key in "abcd"] == [True, False, True, True]
    assert store.num_bytes == 48


def test_what_is_larger_than_the_budget_changes_nothing() -> None:
    store = SlotStore()
    store.put({"a": VALUE}, budget_bytes=32)
    assert not store.put({"b": VALUE, "c": VALUE, "d": VALUE}, budget_bytes=32)
    assert [key in store for key in "abcd"] == [True, False, False, False]


def test_a_key_that_is_there_counts_once() -> None:
    store = SlotStore()
    for _ in range(3):
        store.put({"a": VALUE}, budget_bytes=32)
    assert (len(store), store.num_bytes) == (1, 16)


def test_a_budget_of_0_drops_all() -> None:
    store = SlotStore()
    store.put({"a": VALUE, "b": VALUE}, budget_bytes=32)
    store.shrink(0)
    assert len(store) == 0
