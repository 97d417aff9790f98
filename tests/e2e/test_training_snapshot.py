"""What a run remembers of its first step, on a module of two layers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from spec_export.artifact.source import TrainingRecord
from spec_export.training.snapshot import (
    RunMemory,
    Snapshot,
    digest,
    finite,
    saved_values,
)

STATE_FILE = "state.json"


class Draft(torch.nn.Module):
    _keys_to_ignore_on_save = ("unsaved.weight",)

    def __init__(self) -> None:
        super().__init__()
        self.trained = torch.nn.Linear(4, 4)
        self.frozen = torch.nn.Linear(4, 4, bias=False).requires_grad_(False)
        self.unsaved = torch.nn.Linear(2, 2, bias=False)
        self.register_buffer("d2t", torch.arange(4))


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Any]:
    torch.manual_seed(0)
    yield SimpleNamespace(
        model=Draft(),
        resume_from_checkpoint=True,
        checkpointer=SimpleNamespace(path=tmp_path / "run", previous_epoch=-1),
    )


def begin(trainer: Any, tmp_path: Path) -> RunMemory:
    file = tmp_path / STATE_FILE
    memory = RunMemory.begin(trainer, saved_values(trainer.model), file)
    memory.save(file)
    return memory


def look(memory: RunMemory, trainer: Any) -> dict[str, bool]:
    return memory.look(trainer, saved_values(trainer.model))


NAMES = ("trained.weight", "trained.bias", "frozen.weight", "d2t")
UNMOVED = dict.fromkeys(NAMES, False)


def test_nothing_has_moved_at_first(trainer: Any, tmp_path: Path) -> None:
    assert look(begin(trainer, tmp_path), trainer) == UNMOVED


def test_the_smallest_move_in_the_live_dtype_is_seen(
    trainer: Any, tmp_path: Path
) -> None:
    memory = begin(trainer, tmp_path)
    with torch.no_grad():
        weight = trainer.model.trained.weight
        before = weight[0, 0].bfloat16()
        weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(9.0))
        assert weight[0, 0].bfloat16() == before  # a checkpoint would not show it
    assert look(memory, trainer) == UNMOVED | {"trained.weight": True}
    with torch.no_grad():
        weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(-9.0))
    assert look(memory, trainer)["trained.weight"] is True  # it has moved once


def test_a_frozen_tensor_that_somebody_writes_to_is_seen(
    trainer: Any, tmp_path: Path
) -> None:
    memory = begin(trainer, tmp_path)
    with torch.no_grad():
        trainer.model.frozen.weight.add_(1)
        trainer.model.d2t.add_(1)
    assert look(memory, trainer) == UNMOVED | {"frozen.weight": True, "d2t": True}


def resume(trainer: Any) -> None:
    """What speculators' resume does to the weights: they come back rounded."""
    trainer.checkpointer.previous_epoch = 0
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.copy_(parameter.bfloat16().float())


def test_rounding_by_a_resume_is_no_move(trainer: Any, tmp_path: Path) -> None:
    first = begin(trainer, tmp_path)
    resume(trainer)
    second = begin(trainer, tmp_path)
    assert second.run_id == first.run_id
    assert look(second, trainer) == UNMOVED


def test_a_move_before_the_resume_is_known_after_it(
    trainer: Any, tmp_path: Path
) -> None:
    begin(trainer, tmp_path)  # and then the process dies before any export
    with torch.no_grad():
        trainer.model.trained.weight.add_(1)
    resume(trainer)
    memory = begin(trainer, tmp_path)
    assert look(memory, trainer) == UNMOVED | {"trained.weight": True}


def test_a_run_that_began_without_us_says_only_what_it_saw(
    trainer: Any, tmp_path: Path
) -> None:
    resume(trainer)
    memory = begin(trainer, tmp_path)
    assert look(memory, trainer) == {}
    with torch.no_grad():
        trainer.model.trained.bias.add_(1)
    assert look(memory, trainer) == {"trained.bias": True}


@pytest.mark.parametrize("state", ["", "[]", '{"training": "another"}'])
def test_a_state_file_of_another_training_is_not_taken(
    trainer: Any, tmp_path: Path, state: str
) -> None:
    first = begin(trainer, tmp_path)
    (tmp_path / STATE_FILE).write_text(state)
    resume(trainer)
    second = begin(trainer, tmp_path)
    assert second.run_id != first.run_id
    assert second.complete is False


def test_a_snapshot_rounds_floats_and_nothing_else() -> None:
    values = {
        "w": torch.tensor([[1.0, 1.001], [3.0, 1e30]]),
        "d2t": torch.tensor([1, 2**40]),
        "t2d": torch.tensor([True, False]),
    }
    snapshot = Snapshot(values, torch.bfloat16, {}, TrainingRecord(global_step=3))
    assert {n: (t.dtype, t.shape) for n, t in snapshot.tensors.items()} == {
        "w": ("BF16", (2, 2)),
        "d2t": ("I64", (2,)),
        "t2d": ("BOOL", (2,)),
    }
    read = snapshot.read("w")
    assert read.dtype.name == "bfloat16"
    assert read.astype(np.float32).tolist() == values["w"].bfloat16().float().tolist()
    assert snapshot.read("d2t").tolist() == [1, 2**40]
    assert snapshot.read("t2d").tolist() == [True, False]


def test_digest_is_of_the_raw_bytes() -> None:
    values = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    assert digest(values) == hashlib.sha256(b"\x80\x3f\x00\x40").hexdigest()


def test_metrics_that_json_cannot_hold() -> None:
    assert finite({"a": float("nan"), "b": 1.5, "c": float("-inf")}) == {
        "a": None,
        "b": 1.5,
        "c": None,
    }
