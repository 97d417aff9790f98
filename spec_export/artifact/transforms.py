"""The numbers of the named transforms (``layout/transforms.py``), in blocks of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from spec_export.artifact.blocks import BLOCK_BYTES, mapping_of, release
from spec_export.artifact.dtypes import cast, numpy_dtype
from spec_export.artifact.values import target_ids

Arguments = Mapping[str, Any]


def transformed_blocks(
    name: str,
    sources: Sequence[np.ndarray],
    arguments: Arguments,
    shape: tuple[int, ...],
    dtype: str,
) -> Iterator[np.ndarray]:
    """Compute a tensor of an export, in flat blocks.

    Args:
        name: Named transform.
        sources: Its source tensors, maps of files included.
        arguments: Its arguments.
        shape: Shape of the result, as planned.
        dtype: Saved float dtype, safetensors' spelling.

    Yields:
        1-D arrays of the saved dtype, together the tensor in C order.
    """
    for block in _RULES[name](sources, arguments, shape, dtype):
        yield np.ascontiguousarray(block).reshape(-1)


def _row_count(shape: Sequence[int]) -> int:
    width = max(1, int(np.prod(shape[1:])))
    return max(1, BLOCK_BYTES // (4 * width))


def _row_blocks(array: np.ndarray) -> Iterator[np.ndarray]:
    """Consecutive rows; pages of a mapped file are dropped behind the reader."""
    step, mapping = _row_count(array.shape), mapping_of(array)
    for start in range(0, array.shape[0], step):
        yield array[start : start + step]
        if mapping is not None:
            release(mapping)


def _constant(
    sources: Sequence[np.ndarray],
    arguments: Arguments,
    shape: tuple[int, ...],
    dtype: str,
) -> Iterator[np.ndarray]:
    step = _row_count(shape)
    for start in range(0, shape[0], step):
        rows = min(step, shape[0] - start)
        yield np.full((rows, *shape[1:]), arguments["value"], numpy_dtype(dtype))


def _insert(
    sources: Sequence[np.ndarray],
    arguments: Arguments,
    shape: tuple[int, ...],
    dtype: str,
) -> Iterator[np.ndarray]:
    (array,) = sources
    rows, columns = list(arguments.get("rows", ())), list(arguments.get("columns", ()))
    values = list(arguments.get("values", [arguments["value"]] * len(rows)))
    at = 0

    def new_rows(before: int) -> Iterator[np.ndarray]:
        """The inserted rows that stand before row ``before`` of the source."""
        while rows and rows[0] <= before:
            rows.pop(0)
            yield np.full((1, *shape[1:]), values.pop(0), numpy_dtype(dtype))

    for block in _row_blocks(array):
        end = at + len(block)
        while at < end:
            yield from new_rows(at)
            stop = min([end, *(place for place in rows if place > at)])
            piece = cast(
                block[len(block) - (end - at) : len(block) - (end - stop)], dtype
            )
            if columns:
                piece = np.insert(piece, columns, arguments["value"], axis=1)
            yield piece
            at = stop
    yield from new_rows(at)


def _scatter_rows(
    sources: Sequence[np.ndarray],
    arguments: Arguments,
    shape: tuple[int, ...],
    dtype: str,
) -> Iterator[np.ndarray]:
    ids = target_ids(sources[-1])  # rising: values.check_vocab_map
    table = sources[0] if len(sources) == 2 else None
    step = _row_count(shape)
    for start in range(0, shape[0], step):
        end = min(start + step, shape[0])
        first, last = np.searchsorted(ids, [start, end])
        out = np.zeros((end - start, shape[1]), numpy_dtype(dtype))
        out[:, -1] = arguments["outside"]
        out[ids[first:last] - start, -1] = 0
        if table is not None:
            out[ids[first:last] - start, :-1] = cast(table[first:last], dtype)
        yield out


def _scale(
    sources: Sequence[np.ndarray],
    arguments: Arguments,
    shape: tuple[int, ...],
    dtype: str,
) -> Iterator[np.ndarray]:
    # Rounded to the saved dtype first: a live module and its checkpoint then become
    # the same bytes.
    by = np.float32(arguments["by"])
    for block in _row_blocks(sources[0]):
        yield cast(cast(block, dtype).astype(np.float32) * by, dtype)


def _take_expert(
    sources: Sequence[np.ndarray],
    arguments: Arguments,
    shape: tuple[int, ...],
    dtype: str,
) -> Iterator[np.ndarray]:
    start = arguments["start"]
    part = sources[0][arguments["expert"], start : start + arguments["rows"]]
    for block in _row_blocks(part):
        yield cast(block, dtype)


_Rule = Callable[
    [Sequence[np.ndarray], Arguments, tuple[int, ...], str], Iterator[np.ndarray]
]
_RULES: dict[str, _Rule] = {
    "constant": _constant,
    "insert": _insert,
    "scale": _scale,
    "scatter-rows": _scatter_rows,
    "take-expert": _take_expert,
}
