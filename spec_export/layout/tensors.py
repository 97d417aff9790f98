"""The name, dtype and shape of a tensor: all that the layout needs to know of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Bytes per element, by the spelling of safetensors' header.
ITEM_SIZE = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}
FLOATS = frozenset({"F16", "BF16", "F32", "F64"})


@dataclass(frozen=True)
class TensorInfo:
    """A tensor without its values.

    Attributes:
        name: Its name in the file or module.
        dtype: safetensors' spelling, for example ``BF16``.
        shape: Its dimensions; ``()`` is a scalar.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def is_float(self) -> bool:
        """Whether it is a plain float weight (fp8 and integers are not)."""
        return self.dtype in FLOATS

    @property
    def nbytes(self) -> int:
        """Size of the data in bytes."""
        return math.prod(self.shape) * ITEM_SIZE[self.dtype]
