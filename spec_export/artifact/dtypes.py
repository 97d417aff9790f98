"""Float formats: their names, which one an export gets, and rounding to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import ml_dtypes
import numpy as np

from spec_export.artifact.blocks import BLOCK_BYTES, iter_blocks
from spec_export.findings import Finding, error, usage_error
from spec_export.layout.tensors import TensorInfo

_NUMPY = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I16": np.dtype("<i2"),
    "U16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I32": np.dtype("<i4"),
    "U32": np.dtype("<u4"),
    "F32": np.dtype("<f4"),
    "I64": np.dtype("<i8"),
    "U64": np.dtype("<u8"),
    "F64": np.dtype("<f8"),
}
_NAMES = {dtype: name for name, dtype in _NUMPY.items()}
_CONFIG_NAMES = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
}
_OVERRIDES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_INTEGERS = frozenset({"BOOL", "U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64"})


@dataclass(frozen=True)
class Cast:
    """A tensor whose float format changes on the way to the export."""

    name: str
    from_: str
    to: str


class DtypeChoice(NamedTuple):
    """The float format of an export.

    Attributes:
        dtype: safetensors' spelling.
        casts: The tensors that change their format.
        findings: One ``dtype-unsupported`` error for each tensor that is neither
            a plain float nor an integer nor a boolean.
    """

    dtype: str
    casts: list[Cast]
    findings: list[Finding]


def numpy_dtype(name: str) -> np.dtype:
    """The numpy type of a safetensors dtype name.

    Raises:
        SpecExportError: ``dtype-unsupported`` for a name without one.
    """
    if name not in _NUMPY:
        raise usage_error(
            "dtype-unsupported", name, f"{name} is no dtype that can be read here"
        )
    return _NUMPY[name]


def dtype_name(dtype: np.dtype | type) -> str:
    """safetensors' name of a numpy type, whatever its byte order."""
    plain = np.dtype(dtype)
    if plain.byteorder == ">":
        plain = plain.newbyteorder("<")
    if plain not in _NAMES:
        raise usage_error(
            "dtype-unsupported", str(plain), f"{plain} cannot be stored in safetensors"
        )
    return _NAMES[plain]


def config_name(name: str) -> str:
    """How config.json spells a float dtype: ``BF16`` is ``bfloat16``."""
    return _CONFIG_NAMES[name]


def choose_dtype(
    infos: Iterable[TensorInfo], override: str | None = None
) -> DtypeChoice:
    """Decide the float format of an export.

    A format that all float tensors share is kept, mixed ones become bfloat16;
    integers and booleans never change.

    Args:
        infos: The tensors to be written, as they are in the source.
        override: ``bfloat16``, ``float16`` or ``float32``, from ``--dtype``.

    Raises:
        SpecExportError: ``option-invalid``, exit 2, for another override.
    """
    if override is not None and override not in _OVERRIDES:
        raise usage_error(
            "option-invalid",
            "--dtype",
            f"{override} is not a dtype of an export",
            f"one of {', '.join(_OVERRIDES)}",
        )
    tensors = list(infos)
    found = {t.dtype for t in tensors if t.is_float}
    if override is not None:
        dtype = _OVERRIDES[override]
    else:
        dtype = found.pop() if len(found) == 1 else "BF16"
    casts = [
        Cast(t.name, t.dtype, dtype) for t in tensors if t.is_float and t.dtype != dtype
    ]
    findings = [
        error(
            "dtype-unsupported",
            t.name,
            f"{t.name} is stored as {t.dtype}, which is no plain weight",
            "export from a checkpoint whose draft is not quantised",
        )
        for t in tensors
        if not t.is_float and t.dtype not in _INTEGERS
    ]
    return DtypeChoice(dtype, casts, findings)


def cast(array: np.ndarray, dtype: str) -> np.ndarray:
    """Round a float array to another format, to nearest, ties to even.

    Integers and booleans are returned as they are, and so is an array that has
    the format already. A value beyond the range becomes infinite, which
    ``cast_error`` reports.
    """
    if dtype_name(array.dtype) not in _CONFIG_NAMES:
        return array
    wanted = numpy_dtype(dtype)
    if array.dtype == wanted:
        return array
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(wanted)


def cast_blocks(
    array: np.ndarray, dtype: str, block_bytes: int = BLOCK_BYTES
) -> Iterator[np.ndarray]:
    """``cast`` in flat blocks, so that no second copy of the array is made."""
    for block in iter_blocks(array, block_bytes):
        yield cast(block, dtype)


def cast_error(array: np.ndarray, dtype: str) -> tuple[float, int | None]:
    """What rounding to another format costs.

    Returns:
        The largest absolute difference over values that stay finite, and the
        flat index of the first finite value that does not (None if none).
    """
    worst, overflow, seen = 0.0, None, 0
    for block in iter_blocks(array):
        rounded = cast(block, dtype)
        if rounded is not block:
            wide = block.astype(np.float64)
            with np.errstate(invalid="ignore"):
                difference = np.abs(wide - rounded.astype(np.float64))
            if overflow is None:
                lost = np.isfinite(wide) & np.isinf(difference)
                if lost.any():
                    overflow = seen + int(lost.argmax())
            finite = difference[np.isfinite(difference)]
            worst = max(worst, float(finite.max(initial=0.0)))
        seen += block.size
    return worst, overflow
