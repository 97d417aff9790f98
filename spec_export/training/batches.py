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
    """A loader that shows its batches on the way, and is itself in all else.

    What is read, set, copied, pickled or asked for its class is the trainer's own
    loader: somebody else's code may do any of it.

    Args:
        loader: The trainer's.
        see: Gets each batch before the trainer does.
    """

    _loader: Any
    _see: Callable[[Any], None]

    def __init__(self, loader: Any, see: Callable[[Any], None]) -> None:
        vars(self).update(_loader=loader, _see=see)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            self._see(batch)
            yield batch

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._loader, name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._loader.__reduce_ex__(protocol)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return self._loader.__class__


class KeptBatch:
    """Keeps one batch: of validation as soon as there was any, else of training.

    Attributes:
        batch: What is kept; None before the first usable one.
    """

    def __init__(self) -> None:
        self.batch: Batch | None = None

    def watched(self, kind: BatchKind, loader: Any) -> WatchedLoader:
        """The loader to put in the place of a trainer's."""
        seen = False

        def see(batch: Any) -> None:
            nonlocal seen
            if seen:
                return
            try:
                kept = Batch(kind, stretch(batch, KEPT_ROWS))
            except TrainingInterruptedError:
                raise
            except Exception:  # whatever this is, the training may need it; we do not
                return
            seen = True
            if kind == "validation" or self.batch is None:
                self.batch = kept

        return WatchedLoader(loader, see)
