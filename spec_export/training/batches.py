"""A stretch of a real batch, kept for the comparison.

The trainer's loader is watched, not the model: what it gives lies on the CPU, is the
same under every way to train, and costs no wait for a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from speculators.train.graceful_shutdown import TrainingInterruptedError

from spec_export.judge.inputs import stretch

BatchKind = Literal["training", "validation"]
# As many rows as a comparison takes by default; a few megabytes at most.
KEPT_ROWS = 256


@dataclass(frozen=True)
class Batch:
    """Some rows of the first usable batch of this process.

    Attributes:
        kind: Text that the draft is trained with, or that is held back from it.
        tensors: By speculators' names, [1, rows, ...], on the CPU; floats in bfloat16.
    """

    kind: BatchKind
    tensors: Mapping[str, torch.Tensor]


class WatchedLoader:
    """A loader that shows its first batches on the way.

    Args:
        loader: The trainer's; everything but the iteration is its own.
        see: Gets each batch until it returns True.
    """

    def __init__(self, loader: Any, see: Callable[[Any], bool]) -> None:
        self._loader = loader
        self._see = see
        self._done = False

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            if not self._done:
                self._done = self._see(batch)
            yield batch

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class KeptBatch:
    """Keeps one batch: of validation as soon as there was any, else of training.

    Attributes:
        batch: What is kept; None before the first usable one.
    """

    def __init__(self) -> None:
        self.batch: Batch | None = None

    def watched(self, kind: BatchKind, loader: Any) -> WatchedLoader:
        """The loader to put in the place of a trainer's."""

        def see(batch: Any) -> bool:
            try:
                kept = Batch(kind, stretch(batch, KEPT_ROWS))
            except TrainingInterruptedError:
                raise
            except Exception:  # whatever this is, the training may need it; we do not
                return False
            if kind == "validation" or self.batch is None:
                self.batch = kept
            return True

        return WatchedLoader(loader, see)
