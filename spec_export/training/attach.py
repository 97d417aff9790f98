"""Callbacks for somebody who makes the trainer himself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from spec_export.training.callback import SGLangExport
from spec_export.training.hook import TrainingCallback, fan_out, hook_trainer
from spec_export.training.recipe import require_apart


@contextlib.contextmanager
def attach(trainer: Any, *callbacks: TrainingCallback) -> Iterator[Any]:
    """Let callbacks see what a trainer does.

    ``with attach(trainer, SGLangExport(output_dir=...)): trainer.run_training()``

    Args:
        trainer: A ``speculators.train.trainer.Trainer``.
        callbacks: Called in order, on every rank.

    Yields:
        The trainer.

    Raises:
        SpecExportError: exit 2 if this release of speculators cannot be hooked, or two
            exporters have one output_dir.
    """
    exporters = (c for c in callbacks if isinstance(c, SGLangExport))
    require_apart(
        (f"SGLangExport {index}", exporter.config.output_dir)
        for index, exporter in enumerate(exporters, 1)
    )
    handle = hook_trainer(trainer, fan_out(callbacks))
    try:
        yield trainer
    finally:
        handle.remove()
        close_all(callbacks)


def close_all(callbacks: Sequence[TrainingCallback]) -> None:
    """Let callbacks that have a ``close`` finish what they are doing."""
    for callback in callbacks:
        close = getattr(callback, "close", None)
        if close is not None:
            close()
