"""Walking through large arrays in blocks, with little memory."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import numpy as np

# Small enough that a block stays in the processor's cache between the passes
# over it (digest, value checks, comparison), large enough that numpy's overhead
# per call does not count.
BLOCK_BYTES = 1 << 20


def iter_blocks(
    array: np.ndarray, block_bytes: int = BLOCK_BYTES
) -> Iterator[np.ndarray]:
    """Flat consecutive pieces of an array, as views where it is contiguous.

    Pages of a file that was mapped with ``map_file`` are dropped behind the
    reader: they would otherwise count as memory of this process until the whole
    file is resident.

    Args:
        array: Any shape; copied first if it is not C contiguous.
        block_bytes: Upper bound of a piece, at least one element.

    Yields:
        1-D arrays of the same dtype; none for an empty array.
    """
    flat = np.ascontiguousarray(array).reshape(-1)
    step = max(1, block_bytes // flat.itemsize)
    mapping = mapping_of(array)
    since = 0
    for start in range(0, flat.size, step):
        block = flat[start : start + step]
        yield block
        since += block.nbytes
        if mapping is not None and since >= _RELEASE_BYTES:
            release(mapping)
            since = 0
    if mapping is not None:
        release(mapping)


def as_bytes(block: np.ndarray) -> memoryview:
    """The memory of a contiguous 1-D array as bytes."""
    return block.view(np.uint8).data


# Dropping pages costs a system call and faults of pages that are still in use.
_RELEASE_BYTES = 32 << 20


def map_file(path: str) -> np.ndarray:
    """The bytes of a non-empty file as a read-only uint8 array backed by mmap."""
    with open(path, "rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(mapping, dtype=np.uint8)


def mapping_of(array: np.ndarray) -> mmap.mmap | None:
    """The mapped file that an array is a view of, if it is one."""
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    return base if isinstance(base, mmap.mmap) else None


def release(mapping: mmap.mmap) -> None:
    """Drop the resident pages of a mapping; its contents stay readable."""
    if hasattr(mmap, "MADV_DONTNEED"):
        mapping.madvise(mmap.MADV_DONTNEED)
