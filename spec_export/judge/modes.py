"""Run a module with other weights or other sums without touching or copying it.

Both are torch function modes: they see each operation of a forward and change its
arguments, so that a live module stays bit for bit what it was and at most one changed
weight exists at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

# Places between the random numbers of two rows.
_SHIFT = 5
_BLOCK = 2_000_000  # elements of a weight that are changed at a time

Change = Callable[[torch.Tensor], torch.Tensor]


class ChangedWeights(TorchFunctionMode):
    """Every float parameter reaches its operation changed.

    Args:
        change: Applied to each float parameter where it is used, piece by piece, and
            for an embedding to the rows that are looked up: it must act elementwise.
        others: Applied instead to the parameters with these ``id``.
    """

    def __init__(
        self, change: Change, others: Mapping[int, Change] | None = None
    ) -> None:
        super().__init__()
        self.change = change
        self.others = others or {}
        self._room: torch.Tensor | None = None

    def _changed(self, value: Any, taken: list[torch.Tensor]) -> Any:
        if isinstance(value, nn.Parameter) and value.is_floating_point():
            change = self.others.get(id(value), self.change)
            return self._in_blocks(change, value.detach(), taken)
        return value

    def _in_blocks(
        self, change: Change, value: torch.Tensor, taken: list[torch.Tensor]
    ) -> torch.Tensor:
        """Change a weight piece by piece, into memory that the last one had.

        New memory for each large weight costs several times what the change does.
        """
        width = value.shape[-1] if value.ndim else 1
        blocks = value.reshape(-1, width).split(max(1, _BLOCK // width))
        first = change(blocks[0])
        if len(blocks) == 1:
            return first.view(value.shape)
        room, self._room = self._room, None
        if room is None or room.numel() < value.numel() or room.dtype != first.dtype:
            room = torch.empty(value.numel(), dtype=first.dtype, device=value.device)
        taken.append(room)
        out = room[: value.numel()].view(value.shape)
        for place, block in zip(
            out.view(-1, width).split(len(first)), blocks, strict=True
        ):
            place.copy_(change(block))
        return out

    def _give_back(self, taken: list[torch.Tensor], result: Any) -> None:
        """Use memory again, unless what an operation gave lies in it."""
        parts = result if isinstance(result, (tuple, list)) else (result,)
        held = {
            part.untyped_storage().data_ptr()
            for part in parts
            if isinstance(part, torch.Tensor)
        }
        free = [t for t in taken if t.untyped_storage().data_ptr() not in held]
        if free:
            self._room = max(free, key=torch.Tensor.numel)

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
        if getattr(func, "__name__", "") == "__get__":  # ``.dtype``, ``.shape``
            return func(*args, **kwargs)
        taken: list[torch.Tensor] = []
        args = tuple(self._changed(a, taken) for a in args)
        kwargs = {key: self._changed(value, taken) for key, value in kwargs.items()}
        result = func(*args, **kwargs)
        if taken:
            self._give_back(taken, result)
        return result


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


class SameExperts(TorchFunctionMode):
    """Routers choose again what they chose in the first run, with their own scores.

    A token near the border of two experts takes the other one after the smallest
    change, so how far logits move without this is a matter of luck.

    Attributes:
        moved: Share of the tokens that would have taken other experts, per run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.moved: list[float] = []
        self._chosen: list[torch.Tensor] = []
        self._at: int | None = None
        self._others = self._tokens = 0

    @contextmanager
    def run(self) -> Iterator[None]:
        """One forward; the first one is that whose choice is kept."""
        with self:
            yield
        if self._at is not None:
            self.moved.append(self._others / max(self._tokens, 1))
        self._at = self._others = self._tokens = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is not torch.topk:
            return found
        if self._at is None:
            self._chosen.append(found.indices)
            return found
        chosen = self._chosen[self._at]
        self._at += 1
        apart = chosen.sort(-1).values != found.indices.sort(-1).values
        self._others += int(apart.any(-1).sum())
        self._tokens += len(chosen)
        return torch.return_types.topk((args[0].gather(-1, chosen), chosen))


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


def rounded_scaled(dtype: torch.dtype, scale: float) -> Change:
    """A change to what a weight means that is saved ``scale`` times larger."""

    def change(value: torch.Tensor) -> torch.Tensor:
        saved = (value.to(dtype).float() * scale).to(dtype)
        return (saved.float() / scale).to(value.dtype)

    return change


def jittered(dtype: torch.dtype, seed: int = 7) -> Change:
    """A change of the size of rounding to a dtype, but in a random direction.

    Rounding to the nearest moves a number by up to half a unit in the last place,
    which is ``eps / 2`` of it at most; here each moves by a random part of that. The
    rows of a matrix read one short sequence from different places on: to make as many
    random numbers as there are weights would cost more than the forward.
    """
    half_unit = torch.finfo(dtype).eps / 2

    def change(value: torch.Tensor) -> torch.Tensor:
        width = value.shape[-1]
        flat = value.reshape(-1, width)
        generator = torch.Generator(value.device).manual_seed(seed)
        noise = torch.rand(
            _SHIFT * len(flat) + width,
            generator=generator,
            device=value.device,
            dtype=torch.float32,
        )
        noise = (2 * noise - 1).to(value.dtype).as_strided(flat.shape, (_SHIFT, 1))
        return torch.addcmul(flat, flat, noise, value=half_unit).view(value.shape)

    return change
