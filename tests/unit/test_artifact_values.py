"""Values that cannot be, rounding, and the token map."""

import hashlib

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from spec_export.artifact import blocks
from spec_export.artifact.dtypes import (
    cast,
    cast_blocks,
    cast_error,
    choose_dtype,
    config_name,
    dtype_name,
    numpy_dtype,
)
from spec_export.artifact.values import (
    check_values,
    check_vocab_map,
    scan,
    target_ids,
)
from spec_export.findings import CODES, SpecExportError
from spec_export.layout.tensors import ITEM_SIZE, TensorInfo

FLOATS = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


def info_of(name: str, array: np.ndarray) -> TensorInfo:
    return TensorInfo(name, dtype_name(array.dtype), array.shape)


# --- blocks


def test_blocks_cover_an_array_in_order():
    array = np.arange(1000, dtype=np.int32).reshape(10, 100)
    pieces = list(blocks.iter_blocks(array, 64))
    assert all(piece.nbytes <= 64 for piece in pieces)
    assert np.array_equal(np.concatenate(pieces), array.reshape(-1))
    assert np.array_equal(
        np.concatenate(list(blocks.iter_blocks(array.T, 64))), array.T.reshape(-1)
    )
    assert list(blocks.iter_blocks(np.empty((0, 3)))) == []
    assert [b.tolist() for b in blocks.iter_blocks(np.array(7.0), 1)] == [[7.0]]


def resident(path) -> int:
    """Bytes of a mapped file that count as memory of this process."""
    total, inside = 0, False
    with open("/proc/self/smaps") as maps:
        for line in maps:
            if "-" in line.split(" ")[0]:
                inside = line.rstrip().endswith(str(path))
            elif inside and line.startswith("Rss:"):
                total += int(line.split()[1]) * 1024
    return total


def test_mapped_pages_are_dropped_behind_the_reader(tmp_path):
    path = tmp_path / "big"
    path.write_bytes(b"\1" * (80 << 20))
    array = blocks.map_file(str(path))
    assert int(array[:: 1 << 12].sum()) == 80 << 8
    assert resident(path) > 70 << 20  # what happens without
    blocks.release(blocks.mapping_of(array[3:].reshape(-1, 1)))
    assert resident(path) == 0
    highest = 0
    for block in blocks.iter_blocks(array):
        assert block.min() == 1
        highest = max(highest, resident(path))
    assert 0 < highest < 50 << 20
    assert resident(path) == 0


# --- dtypes


def test_names_and_numpy_types_agree():
    for name, size in ITEM_SIZE.items():
        assert numpy_dtype(name).itemsize == size
        assert dtype_name(numpy_dtype(name)) == name
    assert dtype_name(np.dtype(">f4")) == "F32"
    assert config_name("BF16") == "bfloat16"
    for unknown in ("F4", "C64"):
        with pytest.raises(SpecExportError, match="dtype-unsupported"):
            numpy_dtype(unknown)
    with pytest.raises(SpecExportError, match="dtype-unsupported"):
        dtype_name(np.complex64)


def infos(**dtypes: str) -> list[TensorInfo]:
    return [TensorInfo(name, dtype, (2,)) for name, dtype in dtypes.items()]


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
def test_a_uniform_dtype_is_kept(dtype):
    choice = choose_dtype(infos(a=dtype, b=dtype, d2t="I64", t2d="BOOL"))
    assert choice == (dtype, [], [])


def test_mixed_dtypes_become_bfloat16():
    choice = choose_dtype(infos(norm="F32", fc="BF16", head="F16", d2t="I64"))
    assert choice.dtype == "BF16"
    assert [(c.name, c.from_, c.to) for c in choice.casts] == [
        ("norm", "F32", "BF16"),
        ("head", "F16", "BF16"),
    ]


def test_the_override_wins_and_leaves_integers_alone():
    choice = choose_dtype(infos(fc="BF16", d2t="I64"), "float32")
    assert choice.dtype == "F32"
    assert [c.name for c in choice.casts] == ["fc"]


@pytest.mark.parametrize("override", ["bf16", "fp8", "int8", "float64", ""])
def test_an_override_that_is_none(override):
    with pytest.raises(SpecExportError) as caught:
        choose_dtype([], override)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F4", "F8_E8M0"])
def test_no_plain_weight(dtype):
    (found,) = choose_dtype(infos(fc="BF16", q=dtype)).findings
    assert (found.code, found.subject) == ("dtype-unsupported", "q")


@settings(max_examples=200, deadline=None)
@given(
    hnp.arrays(
        np.float32,
        20,
        elements=st.floats(width=32, allow_nan=False),
    )
)
def test_rounding_is_torchs(values):
    for name, theirs in (("BF16", torch.bfloat16), ("F16", torch.float16)):
        expected = torch.from_numpy(values.copy()).to(theirs).view(torch.int16).numpy()
        assert np.array_equal(cast(values, name).view(np.int16), expected)


def test_ties_go_to_even():
    ties = np.array([0x3F808000, 0x3F818000], np.uint32).view(np.float32)
    assert cast(ties, "BF16").view(np.uint16).tolist() == [0x3F80, 0x3F82]


def test_what_is_not_cast():
    for array in (np.arange(3), np.ones(3, np.bool_), np.ones(3, np.float32)):
        assert cast(array, "F32") is array
    assert cast(np.arange(3), "BF16").dtype == np.int64


def test_the_error_of_a_cast():
    values = np.array([1.0, 1.0 + 2**-9, 2.0, 100_000.0, np.inf], np.float32)
    assert cast_error(values, "F32") == (0.0, None)
    assert cast_error(values, "BF16") == (100_000.0 - 99_840.0, None)
    assert cast_error(values, "F16") == (0.0, 3)
    assert cast_error(values[:2], "BF16") == (2**-9, None)
    assert cast_error(np.arange(3), "BF16") == (0.0, None)


def test_casting_in_blocks_is_casting():
    values = np.random.default_rng(0).normal(size=(30, 7)).astype(np.float32)
    pieces = list(cast_blocks(values, "BF16", 64))
    assert len(pieces) > 10
    assert np.array_equal(np.concatenate(pieces), cast(values, "BF16").reshape(-1))


# --- one pass


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_bad_value_is_found(dtype, bad):
    array = np.random.default_rng(1).normal(size=(40, 9)).astype(dtype)
    assert check_values(info_of("a", array), scan(array)) == []
    array[7, 3] = bad
    array[9, 1] = bad
    scanned = scan(array)
    assert (scanned.non_finite, scanned.first_non_finite) == (2, 7 * 9 + 3)
    (found,) = check_values(info_of("a", array), scanned)
    assert (found.code, found.subject) == ("non-finite", "a")
    assert "[7, 3] (row 7)" in found.message
    assert "2 of 360" in found.message


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_largest_finite_value_is_no_fault(dtype):
    top = ml_dtypes.finfo(dtype).max
    array = np.array([top, -top, 0], dtype=dtype)
    assert scan(array).non_finite == 0


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_scan_agrees_with_numpy(data):
    kind = data.draw(st.sampled_from([np.float16, np.float32, np.float64]))
    bits = {2: np.uint16, 4: np.uint32, 8: np.uint64}[np.dtype(kind).itemsize]
    values = data.draw(hnp.arrays(bits, st.integers(0, 8))).view(kind)
    if data.draw(st.booleans()):
        with np.errstate(invalid="ignore"):
            values = values * kind(0)
    scanned = scan(values)
    finite = np.isfinite(values)
    assert scanned.non_finite == int((~finite).sum())
    assert scanned.all_zero == bool((values == 0).all())
    assert scanned.sha256 == hashlib.sha256(values.tobytes()).hexdigest()
    assert scanned.nbytes == values.nbytes
    if not finite.all():
        assert scanned.first_non_finite == int((~finite).argmax())


def test_positions_count_over_blocks_and_pieces():
    pieces = [np.zeros(1 << 20, np.float32), np.full(3, np.nan, np.float32)]
    scanned = scan(pieces)
    assert scanned.first_non_finite == 1 << 20
    assert scanned.sha256 == hashlib.sha256(np.concatenate(pieces)).hexdigest()


@pytest.mark.parametrize("dtype", [*FLOATS, np.int64, np.bool_])
def test_all_zeros(dtype):
    zeros = np.zeros((3, 4), dtype)
    (found,) = check_values(info_of("fc.weight", zeros), scan(zeros))
    assert (found.code, found.subject) == ("all-zero", "fc.weight")
    assert check_values(info_of("bias", zeros), scan(zeros), may_be_zero=True) == []
    zeros[2, 3] = 1
    assert check_values(info_of("fc.weight", zeros), scan(zeros)) == []


def test_zeros_of_either_sign_are_zeros():
    assert scan(np.array([0.0, -0.0])).all_zero
    empty = np.zeros((0, 4), np.float32)
    assert check_values(info_of("a", empty), scan(empty)) == []


# --- the token map


def d2t_t2d() -> tuple[np.ndarray, np.ndarray]:
    """Twelve of 32 ids."""
    ids = np.array([0, 1, 3, 4, 7, 9, 12, 13, 20, 25, 30, 31])
    mask = np.zeros(32, np.bool_)
    mask[ids] = True
    return ids - np.arange(12), mask


def check(d2t, t2d, vocab=32, rows=12):
    return [(f.code, f.subject) for f in check_vocab_map(d2t, t2d, vocab, rows)]


def test_a_valid_map():
    d2t, t2d = d2t_t2d()
    assert check(d2t, t2d) == []
    assert check(d2t, None) == []
    assert check(d2t, t2d, None, None) == []
    assert target_ids(d2t).tolist() == np.flatnonzero(t2d).tolist()


def broken_maps() -> dict[str, tuple]:
    d2t, t2d = d2t_t2d()

    def changed(at, value):
        copy = d2t.copy()
        copy[at] = value
        return copy

    extra = t2d.copy()
    extra[5] = True
    fewer = t2d.copy()
    fewer[31] = False
    first = np.arange(32) < 12
    return {
        "a: an id beyond the vocabulary": (changed(3, 37), t2d, "d2t", "40"),
        "b: two ids to one": (changed(3, 0), t2d, "d2t", "draft ids 2 and 3"),
        "c: a mask that d2t does not reach": (d2t, extra, "t2d", "target id 5"),
        "d: float offsets": (d2t.astype(np.float32), t2d, "d2t", "F32"),
        "e: shorter than the head": (d2t[:9], t2d, "d2t", "9 entries"),
        "g: never loaded": (d2t * 0, t2d & False, "t2d", "target id 0"),
        "an id below zero": (changed(0, -1), t2d, "d2t", "draft id 0"),
        "an offset that overflows": (changed(5, 2**63 - 1), t2d, "d2t", "draft id 5"),
        "the least offset": (changed(5, -(2**63)), t2d, "d2t", "draft id 5"),
        "ids that fall": (changed(3, 14), t2d, "d2t", "do not rise"),
        "a mask that lacks an id": (d2t, fewer, "t2d", "target id 31"),
        "a mask of another length": (d2t, t2d[:31], "t2d", "[31]"),
        "a mask of numbers": (d2t, t2d.astype(np.int64), "t2d", "I64"),
        "absolute ids": (target_ids(d2t), t2d, "d2t", "draft id 9"),
        "a matrix": (d2t.reshape(3, 4), t2d, "d2t", "[3, 4]"),
        "no entry": (d2t[:0], t2d, "d2t", "[0]"),
        "boolean offsets": (first[:12], t2d, "d2t", "BOOL"),
    }


@pytest.mark.parametrize("name", broken_maps())
def test_a_broken_map_names_the_field(name):
    d2t, t2d, subject, words = broken_maps()[name]
    (found,) = check_vocab_map(d2t, t2d, 32, 12)
    assert (found.code, found.subject) == ("vocab-map-invalid", subject)
    assert words in found.message


def test_zeros_with_the_first_ids_are_an_identity_that_can_be_allowed():
    zeros = np.zeros(12, np.int64)
    assert check(zeros, np.arange(32) < 12) == [("vocab-map-identity", "d2t")]
    assert check(zeros, None) == [("vocab-map-identity", "d2t")]
    assert CODES["vocab-map-identity"].allowable
    assert not CODES["vocab-map-invalid"].allowable


def test_a_full_vocabulary_is_an_identity_by_right():
    assert check(np.zeros(32, np.int64), np.ones(32, np.bool_), 32, 32) == []


@pytest.mark.parametrize("dtype", [np.int32, np.int16, np.uint64])
def test_other_integers_are_integers(dtype):
    d2t, t2d = d2t_t2d()
    assert check(d2t.astype(dtype), t2d) == []
    wrong = d2t.astype(dtype)
    wrong[11] = 25
    assert check(wrong, t2d) == [("vocab-map-invalid", "d2t")]


@settings(max_examples=200, deadline=None)
@given(ids=st.sets(st.integers(0, 39), min_size=1), data=st.data())
def test_any_map_that_speculators_builds_passes_and_one_changed_offset_does_not(
    ids, data
):
    rising = np.array(sorted(ids))
    mask = np.zeros(40, np.bool_)
    mask[rising] = True
    d2t = rising - np.arange(len(rising))
    identity = not d2t.any() and len(d2t) != 40
    assert check(d2t, mask, 40, len(d2t)) == (
        [("vocab-map-identity", "d2t")] if identity else []
    )
    changed = d2t.copy()
    at = data.draw(st.integers(0, len(d2t) - 1))
    changed[at] += data.draw(st.integers(-50, 50).filter(bool))
    assert "vocab-map-invalid" in [c for c, _ in check(changed, mask, 40, len(d2t))]
