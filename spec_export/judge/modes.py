"""Run a module with other weights or other sums without touching or copying it.

Both are torch function modes: they see each operation of a forward and change its
arguments, so that a live module stays bit for bit what it was and at most one changed
weight exists at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

Change = Callable[[torch.Tensor], torch.Tensor]


class ChangedWeights(TorchFunctionMode):
    """Every float parameter reaches its operation changed.

    Args:
        change: Applied to each float parameter where it is used; for an embedding to
            the rows that are looked up (so it must act elementwise).
    """

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change

    def _changed(self, value: Any) -> Any:
        if isinstance(value, nn.Parameter) and value.is_floating_point():
            return self.change(value.detach())
        return value

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.embedding:
            return self.change(func(*args, **kwargs))
        if getattr(func, "__name__", "") != "__get__":  # not ``.dtype``, ``.shape``
            args = tuple(self._changed(a) for a in args)
            kwargs = {key: self._changed(value) for key, value in kwargs.items()}
        return func(*args, **kwargs)


class ReorderedSums(TorchFunctionMode):
    """Every linear layer sums its inputs in three pieces: the same sum, reordered.

    What the logits move by under it is the rounding noise of the computation.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.linear:
            return func(*args, **kwargs)
        return _in_pieces(*args, **kwargs)


class OwnRandomness(TorchFunctionMode):
    """Random numbers come from a generator of ours: the process's own is not touched.

    Args:
        device: Where the computation runs; CPU numbers are covered as well.
        seed: Of each generator.
    """

    _DRAWS = frozenset(
        {torch.rand, torch.randn, torch.randint, torch.randperm, torch.multinomial}
    )

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        super().__init__()
        kinds = {torch.device("cpu"), device}
        self._generators = {d.type: torch.Generator(d).manual_seed(seed) for d in kinds}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in self._DRAWS and kwargs.get("generator") is None:
            where = kwargs.get("device")
            if args and isinstance(args[0], torch.Tensor):
                where = args[0].device
            kind = torch.device(where or "cpu").type
            kwargs["generator"] = self._generators.get(kind)
        return func(*args, **kwargs)


def _in_pieces(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    width = x.shape[-1]
    cuts = [0, width // 3, width // 2 + 1, width]
    out = None
    for start, end in reversed(list(pairwise(cuts))):
        piece = F.linear(x[..., start:end], weight[:, start:end])
        out = piece if out is None else out + piece
    assert out is not None
    return out if bias is None else out + bias


def rounded_to(dtype: torch.dtype) -> Change:
    """A change that rounds to a dtype and goes on in the tensor's own."""

    def change(value: torch.Tensor) -> torch.Tensor:
        return value.to(dtype).to(value.dtype)

    return change


def jittered(dtype: torch.dtype, seed: int = 7) -> Change:
    """A change of the size of rounding to a dtype, but in a random direction.

    Rounding to the nearest moves a number by up to half a unit in the last place,
    which is ``eps / 2`` of it at most; here each moves by a random part of that.
    """
    half_unit = torch.finfo(dtype).eps / 2

    def change(value: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator(value.device).manual_seed(seed)
        noise = torch.rand(
            value.shape, generator=generator, device=value.device, dtype=torch.float32
        )
        return (value * (1 + half_unit * (2 * noise - 1))).to(value.dtype)

    return change
