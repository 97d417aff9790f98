"""Where the rounded tensors of a snapshot lie: one block of host memory per run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

_ALIGNMENT = 64  # bytes, a cache line


class HostBuffer:
    """Memory that each snapshot of a run uses again.

    Fresh pages cost several times what the copy itself costs, so they are paid for
    once. Page-locked where the tensors lie on an accelerator.
    """

    def __init__(self) -> None:
        self._layout: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        self._slots: dict[str, torch.Tensor] = {}
        self._stamps: dict[str, tuple[int, ...] | None] = {}
        self._versions: dict[str, int] = {}

    @property
    def nbytes(self) -> int:
        """Size of the block in bytes."""
        return sum(slot.nbytes for slot in self._slots.values())

    def fill(
        self,
        values: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        parameters: Mapping[str, Any],
    ) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
        """Copy tensors into the block, floats rounded on the way.

        A frozen parameter to which nobody has written since the last time is not
        copied again.

        Args:
            values: The live tensors, on any device.
            dtype: What floats are rounded to.
            parameters: The model's own, by the same names where there is one.

        Returns:
            The copies, valid until the next call, and for each a number that is the
            same as last time if its bytes are.
        """
        self._allocate(
            {
                name: (_saved_as(value, dtype), tuple(value.shape))
                for name, value in values.items()
            },
            pinned=any(value.is_cuda for value in values.values()),
        )
        for name, value in values.items():
            stamp = _stamp(parameters.get(name))
            if stamp is not None and stamp == self._stamps.get(name):
                continue
            # An interruption within the copy must not pass for a finished one.
            self._stamps[name] = None
            self._versions[name] = self._versions.get(name, 0) + 1
            self._slots[name].copy_(value, non_blocking=True)
        for device in {value.device for value in values.values() if value.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        self._stamps = {name: _stamp(parameters.get(name)) for name in values}
        return dict(self._slots), dict(self._versions)

    def _allocate(
        self, layout: dict[str, tuple[torch.dtype, tuple[int, ...]]], pinned: bool
    ) -> None:
        if layout == self._layout:
            return
        starts, size = {}, 0
        for name, (dtype, shape) in layout.items():
            starts[name] = size
            size += math.prod(shape) * dtype.itemsize
            size += -size % _ALIGNMENT
        memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        self._slots = {
            name: memory[starts[name] :][: math.prod(shape) * dtype.itemsize]
            .view(dtype)
            .view(shape)
            for name, (dtype, shape) in layout.items()
        }
        self._layout, self._stamps = layout, {}


def _saved_as(value: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    return dtype if value.is_floating_point() else value.dtype


def _stamp(parameter: Any) -> tuple[int, ...] | None:
    """Changes when somebody writes to a frozen parameter; None for what may move."""
    if parameter is None or parameter.requires_grad:
        return None
    local = getattr(parameter, "_local_tensor", parameter)  # of a sharded one
    return parameter._version, local.data_ptr()
