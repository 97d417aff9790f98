"""Events of speculators' Trainer, which has no callbacks of its own.

The only module that touches the trainer's internals. It sets attributes on the
trainer *instance* and on its checkpointer, so no class of speculators is changed
and ``remove`` leaves nothing behind: methods are wrapped, loaders are watched. Works
from speculators 0.8.1 to 0.9;
``tests/e2e/test_training_hook.py`` holds the attributes that are needed.

Order of events, as the trainer makes them: ``start`` before the first step;
``step`` after each one; for each save, after the trainer's own files of it are
complete, ``epoch``, ``mid-epoch``, ``best`` or ``interrupted``; ``end``. With
ordinary saves ``best`` comes after the ``epoch`` of the same weights, and says
that they are the best so far; with ``--save-best`` it is the only one.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from speculators.train.graceful_shutdown import TrainingInterruptedError

from spec_export.findings import usage_error
from spec_export.training.batches import Batch, BatchKind, KeptBatch

Reason = Literal["start", "step", "epoch", "mid-epoch", "best", "interrupted", "end"]

TRAINER_ATTRIBUTES = (
    "checkpointer",
    "config",
    "global_step",
    "maybe_save_checkpoint",
    "maybe_update_best",
    "model",
    "optimizers",
    "resume_from_checkpoint",
    "run_training",
    "train_epoch",
)
# Not needed: without them nothing is recorded.
LOADERS: dict[str, BatchKind] = {"train_loader": "training", "val_loader": "validation"}
CHECKPOINTER_ATTRIBUTES = (
    "path",
    "previous_epoch",
    "save_checkpoint",
    "update_best_symlink",
)

# What a signal raises wherever the main thread is: a callback must let it pass.
INTERRUPTIONS = (TrainingInterruptedError,)


@dataclass(frozen=True)
class TrainingEvent:
    """Something that the trainer did.

    Attributes:
        reason: What it was.
        trainer: The trainer; its model is live and must come back unchanged.
        epoch: Counted from 0; None before the first one.
        local_step: Steps within the epoch at a mid-epoch save, else 0.
        global_step: Optimizer steps so far, over all epochs and resumes.
        path: The trainer's checkpoint folder of this save; None for ``start``,
            ``step`` and ``end``.
        metrics: Validation metrics of these weights; None where the trainer has
            not validated them.
        interrupted: At ``end``: whether a signal ended the training.
        began: At ``interrupted``: when the trainer began that save, on the monotonic
            clock; it ends the process 120 s later.
        gathered: At the save of a sharded model the full tensors that the trainer
            gathered for it, on rank 0 (the other ranks have an empty mapping);
            None where it gathered nothing.
        batch: Some rows of the first batch of this rank's validation, or of its
            training before there was a validation; None before any.
    """

    reason: Reason
    trainer: Any
    epoch: int | None
    local_step: int
    global_step: int
    path: Path | None = None
    metrics: dict[str, float] | None = None
    interrupted: bool = False
    began: float | None = None
    gathered: Mapping[str, Any] | None = None
    batch: Batch | None = None


class TrainingCallback(Protocol):
    """What ``attach`` accepts.

    Every rank of a distributed training gets every event; gathering a sharded
    model needs all of them, writing is for rank 0.
    """

    def on_event(self, event: TrainingEvent) -> None:
        """React to an event; an exception ends the training."""
        ...


@dataclass
class _State:
    started: bool = False
    stepped: int = 0
    epoch: int | None = None
    saved: bool = False
    became_best: bool = False
    interrupted: bool = False
    gathered: Mapping[str, Any] | None = None


@dataclass
class HookHandle:
    """What ``hook_trainer`` put on a trainer.

    Attributes:
        active: False once removed; wrappers that somebody else has wrapped again
            stay in place and do nothing.
    """

    active: bool = True
    _restore: list[Callable[[], None]] = field(default_factory=list)

    def remove(self) -> None:
        """Take everything off again; may be called twice."""
        self.active = False
        while self._restore:
            self._restore.pop()()

    def wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace ``owner.name`` on the instance by ``make(original)``.

        Args:
            owner: The object that gets the attribute.
            name: A method of it.
            make: Gets the original, returns the wrapper.
        """
        original = getattr(owner, name)
        made = make(original)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return (made if self.active else original)(*args, **kwargs)

        self.put(owner, name, wrapper)

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of the instance for as long as the hook is on it."""
        original = getattr(owner, name)
        had_own = name in vars(owner)
        setattr(owner, name, value)

        def restore() -> None:
            if vars(owner).get(name) is not value:
                return  # somebody wrapped it again; theirs still calls ours
            if had_own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)

        self._restore.append(restore)


def hook_trainer(trainer: Any, on_event: Callable[[TrainingEvent], None]) -> HookHandle:
    """Report what a trainer does.

    Args:
        trainer: A ``speculators.train.trainer.Trainer``, not yet running.
        on_event: Called on every rank.

    Returns:
        The handle that takes the hook off.

    Raises:
        SpecExportError: exit 2 ``dependency-missing`` if this release of
            speculators lacks an attribute that is needed.
    """
    require_attributes(trainer)
    return _Hook(trainer, on_event).install()


def require_attributes(trainer: Any) -> None:
    """Make sure that the trainer is one that can be hooked.

    Raises:
        SpecExportError: exit 2 ``dependency-missing``.
    """
    missing = [f"Trainer.{a}" for a in TRAINER_ATTRIBUTES if not hasattr(trainer, a)]
    checkpointer = getattr(trainer, "checkpointer", None)
    missing += [
        f"checkpointer.{a}"
        for a in CHECKPOINTER_ATTRIBUTES
        if not hasattr(checkpointer, a)
    ]
    if missing:
        raise usage_error(
            "dependency-missing",
            "speculators",
            f"this release has no {', '.join(missing)}",
            "install a release that spec-export knows: speculators>=0.8.1,<0.10",
        )


class _Hook:
    """The wrappers, and what they remember between two events."""

    def __init__(self, trainer: Any, on_event: Callable[[TrainingEvent], None]):
        self.trainer = trainer
        self.on_event = on_event
        self.state = _State()
        self.kept = KeptBatch()

    def install(self) -> HookHandle:
        handle, trainer = HookHandle(), self.trainer
        handle.wrap(trainer.checkpointer, "save_checkpoint", self._around_write)
        handle.wrap(trainer.checkpointer, "update_best_symlink", self._around_link)
        handle.wrap(trainer, "maybe_save_checkpoint", self._around_save)
        handle.wrap(trainer, "maybe_update_best", self._around_best)
        handle.wrap(trainer, "train_epoch", self._around_epoch)
        handle.wrap(trainer, "run_training", self._around_run)
        if not _takes_step_callback(trainer):
            handle.wrap(trainer, "_schedulers_step", self._around_schedulers)
        for name in LOADERS:
            if (loader := getattr(trainer, name, None)) is not None:
                watched = self.kept.watched(LOADERS[name], loader)
                with contextlib.suppress(AttributeError):  # a property of a subclass
                    handle.put(trainer, name, watched)
        return handle

    def _start(self) -> None:
        """Report the start once, also to somebody who runs the epochs himself."""
        if not self.state.started:
            self.state.started = True
            self._emit("start")

    def _emit(self, reason: Reason, **facts: Any) -> None:
        facts = {
            "epoch": self.state.epoch,
            "local_step": 0,
            # 0.8 counts a step a few lines after it: a signal may come between.
            "global_step": max(self.trainer.global_step, self.state.stepped),
            # A whole model in float32: held no longer than until its own event.
            "gathered": self.state.gathered,
            "batch": self.kept.batch,
            **facts,
        }
        self.state.gathered = None
        self.on_event(TrainingEvent(reason, self.trainer, **facts))

    def _around_write(self, write: Any) -> Any:
        def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
            with _gathering(self.trainer.checkpointer) as gathered:
                result = write(*args, **kwargs)
            self.state.gathered = gathered[0] if gathered else None
            self.state.saved = True
            return result

        return save_checkpoint

    def _around_link(self, link: Any) -> Any:
        def update_best_symlink(*args: Any, **kwargs: Any) -> Any:
            result = link(*args, **kwargs)
            self.state.became_best = True
            return result

        return update_best_symlink

    def _around_save(self, save: Any) -> Any:
        def maybe_save_checkpoint(
            epoch: int | str, local_step: int = 0, *args: Any, **kwargs: Any
        ) -> Any:
            self.state.saved, self.state.gathered = False, None
            began = time.monotonic()
            result = save(epoch, local_step, *args, **kwargs)
            if not isinstance(epoch, int):
                self.state.interrupted = True
            if self.state.saved:
                reason: Reason = "mid-epoch" if local_step else "epoch"
                path = self.trainer.checkpointer.path / str(epoch)
                if isinstance(epoch, int):
                    self._emit(reason, epoch=epoch, local_step=local_step, path=path)
                else:
                    self._emit("interrupted", path=path, began=began)
            return result

        return maybe_save_checkpoint

    def _around_best(self, update: Any) -> Any:
        def maybe_update_best(epoch: int, val_metrics: Any, *args: Any) -> Any:
            self.state.became_best = False
            result = update(epoch, val_metrics, *args)
            if self.state.became_best:
                self._emit(
                    "best",
                    epoch=epoch,
                    path=self.trainer.checkpointer.path / str(epoch),
                    metrics=dict(val_metrics),
                )
            return result

        return maybe_update_best

    def _around_epoch(self, train: Any) -> Any:
        def train_epoch(epoch: int, *args: Any, **kwargs: Any) -> Any:
            self._start()
            self.state.epoch = epoch
            if not _takes_step_callback(train):
                return train(epoch, *args, **kwargs)
            theirs = kwargs.pop("step_callback", None)

            def step() -> None:
                if theirs is not None:
                    theirs()
                self._emit("step")

            return train(epoch, *args, step_callback=step, **kwargs)

        return train_epoch

    def _around_schedulers(self, schedulers_step: Any) -> Any:
        def _schedulers_step(*args: Any, **kwargs: Any) -> Any:
            result = schedulers_step(*args, **kwargs)
            # The weights are those of the next count, which follows a few lines on.
            self.state.stepped = self.trainer.global_step + 1
            self._emit("step")
            return result

        return _schedulers_step

    def _around_run(self, run: Any) -> Any:
        def run_training(*args: Any, **kwargs: Any) -> Any:
            self._start()
            result = run(*args, **kwargs)
            self._emit("end", interrupted=self.state.interrupted)
            return result

        return run_training


@contextlib.contextmanager
def _gathering(checkpointer: Any) -> Iterator[list[Mapping[str, Any]]]:
    """Keep what a checkpointer gathers of a sharded model while it saves."""
    module = sys.modules[type(checkpointer).__module__]
    gather = getattr(module, "get_model_state_dict", None)
    gathered: list[Mapping[str, Any]] = []
    if gather is None:
        yield gathered
        return

    def keep(*args: Any, **kwargs: Any) -> Any:
        state = gather(*args, **kwargs)
        gathered.append(state)
        return state

    vars(module)["get_model_state_dict"] = keep
    try:
        yield gathered
    finally:
        vars(module)["get_model_state_dict"] = gather


def _takes_step_callback(owner: Any) -> bool:
    """speculators 0.9 reports steps itself; 0.8 does not."""
    train = getattr(owner, "train_epoch", owner)
    return "step_callback" in inspect.signature(train).parameters


def fan_out(callbacks: Sequence[TrainingCallback]) -> Callable[[TrainingEvent], None]:
    """One function that hands an event to each callback, in order."""

    def on_event(event: TrainingEvent) -> None:
        for callback in callbacks:
            callback.on_event(event)

    return on_event
