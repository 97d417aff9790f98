"""Which events the real trainer makes, and what lies on the disk at each."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.numpy import load_file

from spec_export.findings import SpecExportError
from spec_export.training.hook import (
    CHECKPOINTER_ATTRIBUTES,
    TRAINER_ATTRIBUTES,
    TrainingEvent,
    hook_trainer,
    require_attributes,
)
from spec_export.training.snapshot import (
    RunMemory,
    make_record,
    saved_values,
    take_snapshot,
)
from tests.helpers.tiny import Tiny, run_training


class Recorder:
    """Notes events and compares each save with the trainer's own files."""

    def __init__(self, at_step: Callable[[int], None] | None = None) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.steps: list[int] = []
        self.at_step = at_step
        self.compared = 0

    def on_event(self, event: TrainingEvent) -> None:
        if event.reason == "start":
            values = saved_values(event.trainer.model)
            self.memory = RunMemory.begin(event.trainer, values, Path("/nonexistent"))
        if event.reason == "step":
            self.steps.append(event.global_step)
            if self.at_step is not None:
                self.at_step(event.global_step)
            return
        facts: tuple[Any, ...] = (event.reason, event.global_step)
        if event.local_step:
            facts += (event.local_step,)
        if event.path is not None:
            facts += (event.path.name,)
            self.compare_with_files(event)
        self.events.append(facts)

    def compare_with_files(self, event: TrainingEvent) -> None:
        assert event.path is not None
        values = saved_values(event.trainer.model)
        record = make_record(event, self.memory, values)
        snapshot = take_snapshot(event, values, record)
        saved = load_file(event.path / "model.safetensors")
        assert sorted(snapshot.tensors) == sorted(saved)
        for name, array in saved.items():
            assert snapshot.read(name).tobytes() == array.tobytes(), name
        config = json.loads((event.path / "config.json").read_text())
        config.pop("auto_map")
        assert snapshot.config == config
        names = {child.name for child in event.path.iterdir()}
        assert {"optimizer_state_dict.pt", "scheduler_state_dict.pt"} <= names
        if event.reason in ("epoch", "mid-epoch"):
            state = json.loads((event.path / "training_state.json").read_text())
            assert state["global_step"] == event.global_step
        if event.reason == "best":
            assert event.metrics is not None
            written = json.loads((event.path / "val_metrics.json").read_text())
            assert event.metrics == written
        self.compared += 1


def train(tiny: Tiny, tmp_path: Path, *flags: str, at_step: Any = None) -> Recorder:
    recorder = Recorder(at_step)
    run_training(tiny.flags(tmp_path / "run", *flags), recorder)
    return recorder


def test_ordinary_saves_with_the_best_marked_afterwards(
    tiny: Tiny, tmp_path: Path
) -> None:
    found = train(tiny, tmp_path, "--epochs", "2")
    n = found.steps[-1] // 2
    assert found.steps == list(range(1, 2 * n + 1))
    assert found.events == [
        ("start", 0),
        ("epoch", n, "0"),
        ("best", n, "0"),
        ("epoch", 2 * n, "1"),
        ("best", 2 * n, "1"),
        ("end", 2 * n),
    ]
    assert found.compared == 4


def test_mid_epoch_saves_carry_their_step(tiny: Tiny, tmp_path: Path) -> None:
    found = train(tiny, tmp_path, "--checkpoint-freq", "0.3")
    n = found.steps[-1]
    interval = round(n * 0.3)
    # speculators skips one with less than a quarter of an interval behind it.
    middle = [k for k in range(interval, n, interval) if n - k >= interval / 4]
    assert len(middle) >= 3
    assert found.events == [
        ("start", 0),
        *(("mid-epoch", k, k, "0") for k in middle),
        ("epoch", n, "0"),
        ("best", n, "0"),
        ("end", n),
    ]


def test_save_best_saves_once_and_after_validation(tiny: Tiny, tmp_path: Path) -> None:
    found = train(tiny, tmp_path, "--save-best")
    n = found.steps[-1]
    assert found.events == [("start", 0), ("best", n, "0"), ("end", n)]
    assert found.compared == 1


def test_the_end_is_reported_where_the_last_epoch_is_not_saved(
    tiny: Tiny, tmp_path: Path
) -> None:
    # --max-steps ends each epoch, not the training: epochs of 3, 1 and 1 steps.
    flags = ("--epochs", "3", "--max-steps", "3", "--checkpoint-freq", "2")
    found = train(tiny, tmp_path, *flags)
    assert found.steps == [1, 2, 3, 4, 5]
    saves = [e for e in found.events if e[0] == "epoch"]
    assert saves == [("epoch", 3, "0"), ("epoch", 4, "1")]
    assert found.events[-1] == ("end", 5)


def test_a_signal_makes_an_interrupted_save(tiny: Tiny, tmp_path: Path) -> None:
    def interrupt(step: int) -> None:
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    found = train(tiny, tmp_path, at_step=interrupt)
    assert found.events == [("start", 0), ("interrupted", 4, "interrupted"), ("end", 4)]
    assert found.compared == 1


def fake_trainer() -> SimpleNamespace:
    """What is needed of a trainer, and nothing in it."""
    methods = ("run_training", "maybe_save_checkpoint", "maybe_update_best")
    return SimpleNamespace(
        **dict.fromkeys(TRAINER_ATTRIBUTES, 7)
        | {name: lambda *_args: None for name in methods}
        | {"train_epoch": lambda epoch, *, step_callback=None: step_callback()}
        | {
            "checkpointer": SimpleNamespace(
                **{name: lambda *_args: None for name in CHECKPOINTER_ATTRIBUTES}
            )
        }
    )


def test_remove_gives_the_trainer_its_methods_back() -> None:
    trainer = fake_trainer()
    before = dict(vars(trainer)), dict(vars(trainer.checkpointer))
    handle = hook_trainer(trainer, lambda event: None)
    hooked = [name for name, value in vars(trainer).items() if before[0][name] != value]
    assert sorted(hooked) == [
        "maybe_save_checkpoint",
        "maybe_update_best",
        "run_training",
        "train_epoch",
    ]
    handle.remove()
    assert (dict(vars(trainer)), dict(vars(trainer.checkpointer))) == before


def test_loaders_are_watched_until_the_hook_is_removed() -> None:
    trainer = fake_trainer()
    trainer.train_loader, trainer.val_loader = [1, 2], None
    before = trainer.train_loader
    handle = hook_trainer(trainer, lambda event: None)
    assert trainer.train_loader is not before and trainer.val_loader is None
    assert list(trainer.train_loader) == [1, 2]  # what cannot be kept goes on alike
    handle.remove()
    assert trainer.train_loader is before


def test_two_hooks_can_be_removed_in_any_order() -> None:
    trainer = fake_trainer()
    first_events: list[str] = []
    second_events: list[str] = []
    first = hook_trainer(trainer, lambda e: first_events.append(e.reason))
    second = hook_trainer(trainer, lambda e: second_events.append(e.reason))
    trainer.train_epoch(0)
    assert first_events == second_events == ["start", "step"]
    first.remove()
    trainer.run_training()
    assert first_events == ["start", "step"]
    assert second_events == ["start", "step", "end"]
    second.remove()
    trainer.run_training()
    assert second_events == ["start", "step", "end"]


def test_steps_are_reported_without_the_step_callback_of_0_9() -> None:
    """speculators 0.8: `train_epoch(epoch)`, the count rises after the schedulers."""
    trainer = fake_trainer()
    trainer._schedulers_step = lambda: None

    def train_epoch(epoch: int) -> None:
        trainer._schedulers_step()
        trainer.global_step += 1

    trainer.train_epoch = train_epoch
    events: list[TrainingEvent] = []
    hook_trainer(trainer, events.append)
    trainer.train_epoch(2)
    assert [e.reason for e in events] == ["start", "step"]
    assert (events[1].epoch, events[1].global_step) == (2, 8)


@pytest.mark.parametrize("name", TRAINER_ATTRIBUTES)
def test_a_release_without_an_attribute_is_refused_by_name(name: str) -> None:
    trainer = fake_trainer()
    require_attributes(trainer)
    delattr(trainer, name)
    with pytest.raises(SpecExportError) as caught:
        require_attributes(trainer)
    (finding,) = caught.value.findings
    assert finding.code == "dependency-missing"
    assert f"Trainer.{name}" in finding.message
