"""Callbacks for somebody who makes the trainer himself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from spec_export.findings import usage_error
from spec_export.training.callback import SGLangExport
from spec_export.training.hook import TrainingCallback, fan_out, hook_trainer


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
    require_apart(callbacks)
    handle = hook_trainer(trainer, fan_out(callbacks))
    try:
        yield trainer
    finally:
        handle.remove()
        close_all(callbacks)


def require_apart(callbacks: Sequence[TrainingCallback]) -> None:
    """Refuse two exporters of one training into one folder.

    They would share the memory of the run: after a resume each would take the other's
    exports for its own, and remove them.

    Raises:
        SpecExportError: exit 2 ``callback-argument``.
    """
    exporters = [c for c in callbacks if isinstance(c, SGLangExport)]
    folders = [exporter.config.output_dir.resolve() for exporter in exporters]
    for index, folder in enumerate(folders):
        if folder in folders[:index]:
            raise usage_error(
                "callback-argument",
                "init_args.output_dir",
                f"{exporters[index].config.output_dir} is that of another callback too",
                "give each callback a folder of its own",
            )


def close_all(callbacks: Sequence[TrainingCallback]) -> None:
    """Let callbacks that have a ``close`` finish what they are doing."""
    for callback in callbacks:
        close = getattr(callback, "close", None)
        if close is not None:
            close()
