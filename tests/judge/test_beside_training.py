"""A comparison in another thread than the training's leaves the process as it is."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from drafts import make_draft

from spec_export.judge import training_logits, training_module
from spec_export.judge.modes import OwnRandomness
from spec_export.judge.probe import empty_module


def test_numbers_come_from_a_generator_of_its_own() -> None:
    before = torch.get_rng_state()
    with OwnRandomness(torch.device("cpu")):
        drawn = [torch.randperm(9), torch.rand(3), torch.randint(5, (4,))]
    assert torch.equal(torch.get_rng_state(), before)
    with OwnRandomness(torch.device("cpu")):
        again = [torch.randperm(9), torch.rand(3), torch.randint(5, (4,))]
    assert all(torch.equal(a, b) for a, b in zip(drawn, again, strict=True))
    torch.rand(1)
    assert not torch.equal(torch.get_rng_state(), before)


def in_a_thread(act: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(act()))
    thread.start()
    thread.join()
    assert found, "the thread failed"
    return found[0]


def test_a_thread_forks_no_generator_and_sets_no_stance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draft = make_draft(1)
    empty = empty_module(draft.config)
    weights = draft.weights

    def logits() -> list[torch.Tensor]:
        module = training_module(
            draft.config, weights.__getitem__, weights, empty=copy.deepcopy(empty)
        )
        return training_logits(module, draft.inputs())

    expected = logits()

    def must_not(*_args: Any, **_more: Any) -> Any:
        raise AssertionError("this is the whole process's")

    monkeypatch.setattr(torch.random, "fork_rng", must_not)
    monkeypatch.setattr(torch.compiler, "set_stance", must_not)
    found = in_a_thread(logits)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert all(p.is_meta for p in empty.parameters())
    with pytest.raises(AssertionError, match="whole process"):
        logits()  # in the training's own thread both are used, and put back
