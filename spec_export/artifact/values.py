"""Checks of values: numbers that cannot be, copies of the target, the token map."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from spec_export.artifact.blocks import as_bytes, iter_blocks, mapping_of, release
from spec_export.artifact.dtypes import cast, dtype_name
from spec_export.artifact.target import Role, Target
from spec_export.findings import Finding, error, warning
from spec_export.layout.tensors import TensorInfo

# For each float format the integer of its size, all bits but the sign, and the
# smallest magnitude that is infinite or NaN.
_BITS: dict[str, tuple[type[np.unsignedinteger], int, int]] = {
    "BF16": (np.uint16, 0x7FFF, 0x7F80),
    "F16": (np.uint16, 0x7FFF, 0x7C00),
    "F32": (np.uint32, 0x7FFFFFFF, 0x7F800000),
    "F64": (np.uint64, 0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000),
    "F8_E5M2": (np.uint8, 0x7F, 0x7C),
    "F8_E4M3": (np.uint8, 0x7F, 0x7F),
}


@dataclass(frozen=True)
class Scan:
    """What one pass over a tensor tells.

    Attributes:
        sha256: Digest of its raw little-endian bytes.
        nbytes: Their number.
        non_finite: How many values are NaN or infinite.
        first_non_finite: Flat index of the first of them.
        all_zero: Whether every value is zero, of either sign; true for an empty
            tensor.
    """

    sha256: str
    nbytes: int
    non_finite: int
    first_non_finite: int | None
    all_zero: bool


def scan(data: np.ndarray | Iterable[np.ndarray]) -> Scan:
    """Digest a tensor and look for impossible values, in one pass.

    The exponent bits decide, so that no block is converted to a wider format.

    Args:
        data: An array of any shape, or its pieces in order.
    """
    digest = hashlib.sha256()
    size, count, bad = 0, 0, 0
    first: int | None = None
    zero = True
    for piece in [data] if isinstance(data, np.ndarray) else data:
        for block in iter_blocks(piece):
            digest.update(as_bytes(block))
            kind = dtype_name(block.dtype)
            if kind in _BITS:
                bits, magnitude, limit = _BITS[kind]
                absolute = block.view(bits) & bits(magnitude)
                largest = int(absolute.max(initial=0))
                zero = zero and largest == 0
                if largest >= limit:
                    wrong = absolute >= bits(limit)
                    bad += int(np.count_nonzero(wrong))
                    if first is None:
                        first = count + int(wrong.argmax())
            elif zero:
                zero = not block.any()
            size += block.nbytes
            count += block.size
    return Scan(digest.hexdigest(), size, bad, first, zero)


def check_values(
    tensor: TensorInfo, scanned: Scan, *, may_be_zero: bool = False
) -> list[Finding]:
    """Findings for values that no trained tensor has.

    Args:
        tensor: The tensor, for its name and shape.
        scanned: What ``scan`` said about it.
        may_be_zero: False for matrices, which stay zero only when they were
            never loaded; True for biases and token maps.
    """
    if scanned.first_non_finite is not None:
        at = np.unravel_index(scanned.first_non_finite, tensor.shape or (1,))
        where = f"[{', '.join(str(int(i)) for i in at)}]"
        row = f" (row {int(at[0])})" if len(at) > 1 else ""
        total = scanned.nbytes // _item_size(tensor)
        return [
            error(
                "non-finite",
                tensor.name,
                f"{scanned.non_finite} of {total} values are NaN or infinite, the "
                f"first at {where}{row}",
                "the training diverged, or the tensor was never loaded",
            )
        ]
    if scanned.all_zero and scanned.nbytes and not may_be_zero:
        return [
            error(
                "all-zero",
                tensor.name,
                f"all values of {tensor.dtype} {list(tensor.shape)} are zero",
                "the tensor was never loaded or trained",
            )
        ]
    return []


def equals_target(
    array: np.ndarray,
    target: Target,
    role: Role,
    rows: np.ndarray | None = None,
    dtype: str | None = None,
) -> bool:
    """Whether a tensor is the target's, bit for bit, after rounding both.

    Args:
        array: The tensor.
        target: With weights.
        role: Which of its tensors.
        rows: The target's rows that the tensor may be a copy of (through the
            token map), None for all.
        dtype: The saved float format, the array's own by default.
    """
    wanted = dtype or dtype_name(array.dtype)
    other = target.find(role)
    if other is None or target.packed(role):
        return False
    count = other.shape[0] if rows is None else len(rows)
    if array.shape != (count, *other.shape[1:]):
        return False
    flat = np.ascontiguousarray(array).reshape(-1)
    position, mapping = 0, mapping_of(array)
    for theirs in target.iter_rows(role, rows):
        ours = flat[position : position + theirs.size]
        position += theirs.size
        if not np.array_equal(_bytes(ours, wanted), _bytes(theirs, wanted)):
            return False
        if mapping is not None:
            release(mapping)
    return True


def check_mask_row(target: Target, token: int) -> list[Finding]:
    """A warning for a mask token whose row in the target's embedding is all zeros.

    Legal, since a block draft uses the row as it is, in training and in SGLang; but
    a target that was not loaded looks the same.
    """
    embedding = target.find("embedding")
    if embedding is None or target.packed("embedding"):
        return []
    if token < embedding.shape[0] and target.read("embedding", [token]).any():
        return []
    return [
        warning(
            "mask-row-zero",
            "mask_token_id",
            f"is {token}, whose row in the target's embedding is all zeros",
            "that is fine if the draft was trained so; the row is used as it is",
        )
    ]


def target_ids(d2t: np.ndarray) -> np.ndarray:
    """The target's token id of each draft id: ``i + d2t[i]``, int64."""
    return np.arange(len(d2t), dtype=np.int64) + d2t.astype(np.int64)


def check_vocab_map(
    d2t: np.ndarray,
    t2d: np.ndarray | None,
    target_vocab: int | None,
    head_rows: int | None,
) -> list[Finding]:
    """Check a token map: offsets from draft to target ids, and the mask beside it.

    Args:
        d2t: Offset for each draft id; its target id is ``i + d2t[i]``.
        t2d: Mask over the target's vocabulary of the ids that the draft has.
        target_vocab: The target's vocabulary size; the mask's length where it is
            not known.
        head_rows: Rows of the draft's head.

    Returns:
        At most one error for each of ``d2t`` and ``t2d``: ``vocab-map-invalid``,
        or ``vocab-map-identity``, which can be allowed.
    """
    if target_vocab is None and t2d is not None:
        target_vocab = int(t2d.size)
    wrong = _wrong_offsets(d2t, target_vocab, head_rows)
    if wrong is not None:
        return [error("vocab-map-invalid", "d2t", wrong, _REBUILD)]
    ids = target_ids(d2t)
    findings = []
    if t2d is not None and (wrong := _wrong_mask(t2d, ids, target_vocab)) is not None:
        findings.append(error("vocab-map-invalid", "t2d", wrong, _REBUILD))
    if not findings and not d2t.any() and len(d2t) != target_vocab:
        findings.append(
            error(
                "vocab-map-identity",
                "d2t",
                f"all {len(d2t)} offsets are zero: draft id i means target id i; a "
                "map that was never loaded looks the same",
                "if that is meant, --allow vocab-map-identity",
            )
        )
    return findings


_REBUILD = "build the map again from the token frequencies and train with it"


def _wrong_offsets(
    d2t: np.ndarray, target_vocab: int | None, head_rows: int | None
) -> str | None:
    if not np.issubdtype(d2t.dtype, np.integer):
        return f"it is {dtype_name(d2t.dtype)} and has to be an integer (I64)"
    if d2t.ndim != 1 or not d2t.size:
        return f"it has the shape {list(d2t.shape)} and has to be a list of offsets"
    if head_rows is not None and len(d2t) != head_rows:
        return f"it has {len(d2t)} entries, the draft's head has {head_rows} rows"
    places = np.arange(len(d2t), dtype=np.int64)
    # Compared with the offset alone, so that no sum can overflow.
    outside = d2t < -places
    if target_vocab is not None:
        outside |= d2t >= target_vocab - places
    if outside.any():
        at = int(outside.argmax())
        limit = "" if target_vocab is None else f" of {target_vocab}"
        means = at + int(d2t[at])
        return f"draft id {at} means target id {means}, which is none{limit}"
    ids = target_ids(d2t)
    order = np.argsort(ids, kind="stable")
    same = np.flatnonzero(np.diff(ids[order]) == 0)
    if same.size:
        first, second = sorted((int(order[same[0]]), int(order[same[0] + 1])))
        return f"draft ids {first} and {second} both mean target id {ids[first]}"
    falling = np.flatnonzero(np.diff(ids) < 0)
    if falling.size:
        at = int(falling[0])
        return (
            f"target ids do not rise: draft id {at} means {ids[at]} and {at + 1} means "
            f"{ids[at + 1]}, but speculators picks the head's rows in rising order"
        )
    return None


def _wrong_mask(
    t2d: np.ndarray, ids: np.ndarray, target_vocab: int | None
) -> str | None:
    if t2d.dtype != np.bool_:
        return f"it is {dtype_name(t2d.dtype)} and has to be BOOL"
    if t2d.ndim != 1 or t2d.size != target_vocab:
        return (
            f"it has the shape {list(t2d.shape)}, the target's vocabulary has "
            f"{target_vocab} ids"
        )
    reached = np.zeros_like(t2d)
    reached[ids] = True
    differs = np.flatnonzero(reached != t2d)
    if not differs.size:
        return None
    at = int(differs[0])
    does = "reaches" if reached[at] else "does not reach"
    return (
        f"it is {'true' if t2d[at] else 'false'} at target id {at}, which d2t {does} "
        f"({int(t2d.sum())} ids are true, d2t reaches {len(ids)})"
    )


def _bytes(values: np.ndarray, dtype: str) -> np.ndarray:
    return cast(values, dtype).view(np.uint8)


def _item_size(tensor: TensorInfo) -> int:
    return max(1, tensor.nbytes // max(1, int(np.prod(tensor.shape))))
