"""The header of a safetensors file, read with every bound checked.

The format is 8 bytes of length, a JSON object, then the data. The library's
reader judges this one in the tests; errors here name the file and the tensor.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_export.artifact.disk import open_regular
from spec_export.findings import SpecExportError, error
from spec_export.layout.tensors import ITEM_SIZE, TensorInfo

# The bound of the safetensors library.
MAX_HEADER_BYTES = 100_000_000

# Bits per element of formats that drafts never have, but targets may.
_OTHER_BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "C64": 64,
}


@dataclass(frozen=True)
class Span:
    """A tensor and where its bytes are, counted from the start of the file."""

    info: TensorInfo
    start: int
    end: int


@dataclass(frozen=True)
class Header:
    """What a safetensors file says about itself.

    Attributes:
        path: The file.
        tensors: By name, in the order of the header.
        metadata: The strings of ``__metadata__``.
        size: Size of the file in bytes.
    """

    path: Path
    tensors: dict[str, Span]
    metadata: dict[str, str]
    size: int


class _Bad(Exception):
    """What is wrong with a header; becomes a finding that names the file."""


def read_header(path: str | Path) -> Header:
    """Read and check the header of one file.

    Checked are the length, that it is a JSON object without repeated names, each
    dtype, shape and byte range, and that the ranges cover the data without a
    hole or an overlap.

    Raises:
        SpecExportError: exit 1, ``file-missing`` or ``file-corrupt``.
    """
    path = Path(path)
    try:
        with open_regular(path) as file:
            size = file.seek(0, 2)
            file.seek(0)
            text, data_start = _header_text(file, size)
        spans, metadata = _parse(text, data_start, size)
    except FileNotFoundError:
        raise SpecExportError(
            [error("file-missing", path.name, f"{path} is not there")]
        ) from None
    except (_Bad, OSError) as problem:
        raise SpecExportError(
            [
                error(
                    "file-corrupt",
                    path.name,
                    f"{path} is no readable safetensors file: {problem}",
                    "copy or save it again",
                )
            ]
        ) from problem
    return Header(path, spans, metadata, size)


def _header_text(file: Any, size: int) -> tuple[bytes, int]:
    if size < 8:
        raise _Bad(f"it has {size} bytes, and 8 are the least")
    length = int.from_bytes(file.read(8), "little")
    if length > MAX_HEADER_BYTES:
        raise _Bad(f"its header would have {length} bytes")
    if 8 + length > size:
        raise _Bad(
            f"it is truncated: the header would end at byte {8 + length}, "
            f"the file ends at {size}"
        )
    return file.read(length), 8 + length


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _Bad(f"its header holds {twice!r} twice")
    return result


def _parse(
    text: bytes, data_start: int, size: int
) -> tuple[dict[str, Span], dict[str, str]]:
    if not text.startswith(b"{"):
        raise _Bad("its header does not start with '{'")
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as problem:
        raise _Bad(f"its header is no JSON ({problem})") from problem
    metadata = header.pop("__metadata__", {})
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise _Bad("__metadata__ holds something else than strings")
    spans = {
        name: _span(name, entry, data_start, size) for name, entry in header.items()
    }
    position = data_start
    for span in sorted(spans.values(), key=lambda s: (s.start, s.end)):
        if span.start != position:
            kind = "overlap" if span.start < position else "a hole"
            raise _Bad(f"there is {kind} before the data of {span.info.name!r}")
        position = span.end
    if position != size:
        raise _Bad(
            f"its tensors end at byte {position}, the file ends at {size}"
            + (": it is truncated" if position > size else "")
        )
    return spans, metadata


def _span(name: str, entry: Any, data_start: int, size: int) -> Span:
    if not isinstance(entry, dict):
        raise _Bad(f"the entry of {name!r} is no object")
    dtype, shape = entry.get("dtype"), _counts(entry.get("shape"))
    offsets = _counts(entry.get("data_offsets"))
    if not isinstance(dtype, str) or not (dtype in ITEM_SIZE or dtype in _OTHER_BITS):
        raise _Bad(f"{name!r} has the unknown dtype {dtype!r}")
    if shape is None or offsets is None or len(offsets) != 2:
        raise _Bad(f"the shape or the offsets of {name!r} are no lists of counts")
    start, end = offsets
    bits = math.prod(shape) * _bits(dtype)
    if bits % 8 or end - start != bits // 8:
        raise _Bad(
            f"{name!r} is {dtype} {shape}, {bits / 8:g} bytes, but its byte range "
            f"has {end - start}"
        )
    if data_start + end > size:
        raise _Bad(
            f"it is truncated: {name!r} would end at byte {data_start + end}, "
            f"the file ends at {size}"
        )
    return Span(
        TensorInfo(name, dtype, tuple(shape)), data_start + start, data_start + end
    )


def _bits(dtype: str) -> int:
    return 8 * ITEM_SIZE[dtype] if dtype in ITEM_SIZE else _OTHER_BITS[dtype]


def _counts(value: Any) -> list[int] | None:
    """A list of whole numbers from zero on, None for anything else."""
    if isinstance(value, list) and all(
        isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in value
    ):
        return value
    return None
