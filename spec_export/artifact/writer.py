"""Writing safetensors: streamed, hashed, forced to the disk, always the same bytes.

The library's ``save_file`` (0.8.0) does not fsync, creates mode 0600, orders the
metadata at random and wants the whole model in memory; its reader judges what is
written here.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from spec_export.artifact.blocks import as_bytes, iter_blocks
from spec_export.artifact.disk import FileFact, disk_errors, write_file
from spec_export.artifact.header import MAX_HEADER_BYTES
from spec_export.artifact.signals import undisturbed
from spec_export.artifact.weights import INDEX, SINGLE
from spec_export.findings import usage_error
from spec_export.layout.tensors import ITEM_SIZE

DEFAULT_SHARD_SIZE = 5_000_000_000
WRITE_BYTES = 4 << 20
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

Blocks = np.ndarray | Iterable[np.ndarray | bytes]


@dataclass(frozen=True)
class Entry:
    """A tensor to write.

    Attributes:
        name: Its name in the file.
        dtype: safetensors' spelling.
        shape: Its dimensions.
        blocks: Gives the values: an array of this dtype, or pieces of it in
            order.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    blocks: Callable[[], Blocks]

    @property
    def nbytes(self) -> int:
        """Size of the data in bytes."""
        return math.prod(self.shape) * ITEM_SIZE[self.dtype]


@dataclass
class Written:
    """What ``write_weights`` left in a folder.

    Attributes:
        files: Digest and size of each file, the index included.
        weight_map: The file of each tensor.
    """

    files: dict[str, FileFact] = field(default_factory=dict)
    weight_map: dict[str, str] = field(default_factory=dict)


def write_safetensors(
    path: str | Path,
    entries: Iterable[Entry],
    metadata: dict[str, str] | None = None,
) -> FileFact:
    """Write one safetensors file.

    Tensors are ordered by falling element size, then by name, as the library
    does it, so that each is aligned to its element size.

    Args:
        path: Must be in a folder that nobody reads yet.
        entries: In any order.
        metadata: Strings for ``__metadata__``.

    Returns:
        Digest and size of the whole file.

    Raises:
        SpecExportError: exit 2, ``disk-full``.
        ValueError: An entry gave another number of bytes than its shape says, or
            two entries have one name.
    """
    path = Path(path)
    ordered = sorted(entries, key=lambda e: (-ITEM_SIZE[e.dtype], e.name))
    header = _header(ordered, metadata)
    digest, size = hashlib.sha256(), 0

    def stream() -> Iterator[memoryview]:
        yield memoryview(header)
        for entry in ordered:
            yield from _pieces(entry)

    # Hashing and writing both let go of the interpreter lock. One piece at a
    # time, so that a block may reuse its memory for the next one.
    with (
        disk_errors(path),
        path.open("wb", buffering=0) as file,
        undisturbed() as raised,
        ThreadPoolExecutor(1, "spec-export-hash") as hasher,
    ):
        for piece in stream():
            if raised:
                raise raised[0]
            hashed = hasher.submit(digest.update, piece)
            try:
                rest = piece
                while len(rest):
                    rest = rest[file.write(rest) :]
            finally:
                hashed.result()
            size += len(piece)
        os.fsync(file.fileno())
    return FileFact(digest.hexdigest(), size)


def write_weights(
    folder: str | Path,
    entries: Iterable[Entry],
    metadata: dict[str, str] | None = None,
    max_shard_size: str | int | None = None,
) -> Written:
    """Write ``model.safetensors``, or shards and their index.

    Args:
        folder: Nobody reads it yet.
        entries: Filled into shards in this order.
        metadata: ``__metadata__`` of every file.
        max_shard_size: Bytes, or a text such as ``5GB`` (the default). A tensor
            that is larger gets a shard of its own.

    Raises:
        SpecExportError: exit 2, ``disk-full`` or ``option-invalid``.
    """
    folder = Path(folder)
    limit = DEFAULT_SHARD_SIZE if max_shard_size is None else parse_size(max_shard_size)
    shards = _shards(list(entries), limit)
    written = Written()
    for number, shard in enumerate(shards, start=1):
        name = SINGLE
        if len(shards) > 1:
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        written.files[name] = write_safetensors(folder / name, shard, metadata)
        written.weight_map.update({entry.name: name for entry in shard})
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(e.nbytes for s in shards for e in s)},
            "weight_map": dict(sorted(written.weight_map.items())),
        }
        text = json.dumps(index, indent=2) + "\n"
        written.files[INDEX] = write_file(folder / INDEX, text.encode())
    return written


def parse_size(text: str | int) -> int:
    """Bytes of a size such as ``5GB``, ``500MiB`` or ``1000000``.

    Raises:
        SpecExportError: exit 2, ``option-invalid``.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        size = text
    else:
        match = re.fullmatch(
            r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?\s*", str(text).upper()
        )
        if not match or (match[3] and not match[2]):
            size = 0
        else:
            units = _BINARY_UNITS if match[3] else _UNITS
            size = int(float(match[1]) * units[match[2]])
    if size <= 0:
        raise usage_error(
            "option-invalid",
            "--max-shard-size",
            f"{text!r} is no size",
            "a number of bytes, or for example 5GB",
        )
    return size


def _header(entries: list[Entry], metadata: dict[str, str] | None) -> bytes:
    content: dict[str, Any] = {}
    if metadata:
        content["__metadata__"] = dict(sorted(metadata.items()))
    position = 0
    for entry in entries:
        if entry.name in content:
            raise ValueError(f"two tensors are named {entry.name!r}")
        content[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [position, position + entry.nbytes],
        }
        position += entry.nbytes
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"the header would have {len(text)} bytes")
    return len(text).to_bytes(8, "little") + text


def _pieces(entry: Entry) -> Iterator[memoryview]:
    """The bytes of an entry in pieces, counted against its shape."""
    left = entry.nbytes
    data = entry.blocks()
    for block in [data] if isinstance(data, np.ndarray) else data:
        if isinstance(block, np.ndarray):
            if block.dtype.byteorder == ">":
                block = block.astype(block.dtype.newbyteorder("<"))
            if block.dtype.itemsize != ITEM_SIZE[entry.dtype]:
                raise ValueError(
                    f"{entry.name} is {entry.dtype}, its values are {block.dtype}"
                )
            for part in iter_blocks(block, WRITE_BYTES):
                left -= part.nbytes
                yield as_bytes(part)
        else:
            left -= len(block)
            yield memoryview(block)
    if left:
        raise ValueError(
            f"{entry.name} is {entry.dtype} {list(entry.shape)}, {entry.nbytes} "
            f"bytes, and {entry.nbytes - left} were given"
        )


def _shards(entries: list[Entry], limit: int) -> list[list[Entry]]:
    shards: list[list[Entry]] = [[]]
    filled = 0
    for entry in entries:
        if shards[-1] and filled + entry.nbytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled += entry.nbytes
    return shards
