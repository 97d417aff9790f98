"""What is written is judged by the safetensors library."""

import errno
import hashlib
import json
import os
import stat
import threading
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors import deserialize, safe_open
from safetensors.numpy import load_file
from transformers.utils.hub import get_checkpoint_shard_files

from spec_export.artifact import writer
from spec_export.artifact.disk import hash_file, replace_file, write_file
from spec_export.artifact.dtypes import dtype_name
from spec_export.artifact.header import read_header
from spec_export.artifact.weights import INDEX, SINGLE, WeightFiles
from spec_export.artifact.writer import (
    Entry,
    parse_size,
    write_safetensors,
    write_weights,
)
from spec_export.findings import SpecExportError

DTYPES = [
    np.float32,
    np.float16,
    ml_dtypes.bfloat16,
    np.float64,
    np.int64,
    np.int32,
    np.uint8,
    np.bool_,
]


def of(name: str, array: np.ndarray) -> Entry:
    return Entry(name, dtype_name(array.dtype), array.shape, lambda: array)


def raw(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).tobytes()


ARRAYS = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5).map(
        lambda shape: (
            np.random.default_rng(len(shape))
            .integers(0, 256, size=(*shape, np.dtype(dtype).itemsize), dtype=np.uint8)
            .view(dtype if dtype is not np.bool_ else np.uint8)
            .reshape(shape)
            .astype(dtype, copy=False)
        )
    )
)
NAMES = st.text(min_size=1, max_size=8).filter(
    lambda s: s != "__metadata__" and s.isprintable()
)


@settings(max_examples=150, deadline=None)
@given(
    tensors=st.dictionaries(NAMES, ARRAYS, max_size=6),
    metadata=st.dictionaries(NAMES, st.text(max_size=20), max_size=3),
)
def test_the_library_reads_the_same_back(tmp_path_factory, tensors, metadata):
    try:
        json.dumps([*metadata.values(), *tensors], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return  # lone surrogates are no text
    path = tmp_path_factory.getbasetemp() / "w.safetensors"
    fact = write_safetensors(path, [of(n, a) for n, a in tensors.items()], metadata)
    data = path.read_bytes()
    assert fact == (hashlib.sha256(data).hexdigest(), len(data))
    read = dict(deserialize(data))
    assert read.keys() == tensors.keys()
    for name, array in tensors.items():
        assert read[name]["dtype"] == dtype_name(array.dtype)
        assert tuple(read[name]["shape"]) == array.shape
        assert bytes(read[name]["data"]) == raw(array)
    with safe_open(path, framework="np") as file:
        assert (file.metadata() or {}) == metadata


def test_bytes_do_not_depend_on_the_order(tmp_path):
    entries = [
        of("b", np.ones(3, np.float16)),
        of("a", np.ones((2, 2), np.float16)),
        of("flag", np.ones(3, np.bool_)),
        of("ids", np.arange(2)),
    ]
    first = write_safetensors(tmp_path / "1", entries, {"b": "1", "a": "2"})
    second = write_safetensors(tmp_path / "2", entries[::-1], {"a": "2", "b": "1"})
    assert first == second
    spans = read_header(tmp_path / "1").tensors
    assert list(spans) == ["ids", "a", "b", "flag"]
    for span in spans.values():
        assert span.start % writer.ITEM_SIZE[span.info.dtype] == 0


def test_the_header_ends_on_eight_bytes(tmp_path):
    for extra in range(9):
        path = tmp_path / "w"
        write_safetensors(path, [of("a", np.ones(1))], {"k": "x" * extra})
        assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0


def test_blocks_may_reuse_their_memory(tmp_path):
    expected = np.arange(64, dtype=np.float32)

    def blocks():
        buffer = np.empty(16, np.float32)
        for start in range(0, 64, 16):
            buffer[:] = expected[start : start + 16]
            yield buffer

    entry = Entry("a", "F32", (8, 8), blocks)
    fact = write_safetensors(tmp_path / "w", [entry])
    assert np.array_equal(load_file(tmp_path / "w")["a"].reshape(-1), expected)
    assert fact == hash_file(tmp_path / "w")


def test_big_endian_and_strided_values(tmp_path):
    array = np.arange(12, dtype=">f4").reshape(3, 4).T
    entries = [Entry("a", "F32", (4, 3), lambda: array)]
    write_safetensors(tmp_path / "w", entries)
    assert np.array_equal(load_file(tmp_path / "w")["a"], array)


@pytest.mark.parametrize("given_shape", [(3,), (5,)])
def test_values_that_do_not_fill_the_shape(tmp_path, given_shape):
    entry = Entry("a", "F32", (4,), lambda: np.ones(given_shape, np.float32))
    with pytest.raises(ValueError, match="a is F32"):
        write_safetensors(tmp_path / "w", [entry])


def test_values_of_another_size(tmp_path):
    entry = Entry("a", "F32", (4,), lambda: np.ones(2, np.float64))
    with pytest.raises(ValueError, match="float64"):
        write_safetensors(tmp_path / "w", [entry])


def test_two_tensors_of_one_name(tmp_path):
    with pytest.raises(ValueError, match="'a'"):
        write_safetensors(tmp_path / "w", [of("a", np.ones(1))] * 2)


def test_the_mode_follows_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        write_safetensors(tmp_path / "w", [of("a", np.ones(1))])
        write_file(tmp_path / "f", b"x")
    finally:
        os.umask(before)
    for name in ("w", "f"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o640


# --- shards


def entries_of(count: int, size: int) -> list[Entry]:
    return [of(f"layers.{i}.weight", np.full(size, i, np.uint8)) for i in range(count)]


def test_one_file_without_an_index(tmp_path):
    written = write_weights(tmp_path, entries_of(3, 10), {"format": "pt"})
    assert set(written.files) == {SINGLE}
    assert sorted(p.name for p in tmp_path.iterdir()) == [SINGLE]


def test_shards_and_their_index(tmp_path):
    written = write_weights(tmp_path, entries_of(5, 10), {"format": "pt"}, 25)
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert sorted(written.files) == [*names, INDEX]
    assert written.weight_map["layers.2.weight"] == names[1]
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == 50
    assert index["weight_map"] == written.weight_map
    for name, fact in written.files.items():
        assert hash_file(tmp_path / name) == fact
    assert len(WeightFiles.open(tmp_path).tensors) == 5
    with safe_open(tmp_path / names[0], framework="np") as file:
        assert file.metadata() == {"format": "pt"}


def test_transformers_loads_the_shards(tmp_path):
    write_weights(tmp_path, entries_of(3, 10), {"format": "pt"}, 10)
    index = str(tmp_path / INDEX)
    files, meta = get_checkpoint_shard_files(str(tmp_path), index)
    assert len(files) == 3
    assert len(meta["all_checkpoint_keys"]) == 3


def test_a_tensor_larger_than_a_shard_has_one_of_its_own(tmp_path):
    entries = [*entries_of(2, 10), of("big", np.zeros(100, np.uint8))]
    written = write_weights(tmp_path, entries, None, 30)
    assert len(set(written.weight_map.values())) == 2


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5GB", 5 * 10**9),
        ("1.5 kb", 1500),
        ("2MiB", 2 << 20),
        ("7", 7),
        (8, 8),
        ("1g", 10**9),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GB", "5XB", "-1", 0, -5, "0GB", "iB", "5iB", True]
)
def test_what_is_no_size(text):
    with pytest.raises(SpecExportError) as caught:
        parse_size(text)
    assert caught.value.exit_code == 2
    assert caught.value.findings[0].subject == "--max-shard-size"


# --- memory and disk


def test_little_memory_whatever_the_size(tmp_path):
    """100 MB are written with the memory of a few blocks."""
    block = np.ones(1 << 18, np.float32)

    def entry(name):
        return Entry(name, "F32", (50, 1 << 18), lambda: (block for _ in range(50)))

    tracemalloc.start()
    try:
        write_safetensors(tmp_path / "w", [entry("a"), entry("b")])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20 << 20
    assert (tmp_path / "w").stat().st_size > 100 << 20


def test_a_full_disk_is_exit_2(tmp_path):
    with pytest.raises(SpecExportError) as caught:
        write_safetensors("/dev/full", [of("a", np.ones(1))])
    assert caught.value.exit_code == 2
    assert caught.value.findings[0].code == "disk-full"
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert not [t for t in threading.enumerate() if "spec-export" in t.name]


def test_a_place_that_cannot_be_written(tmp_path):
    with pytest.raises(SpecExportError) as caught:
        write_safetensors(tmp_path / "no" / "w", [of("a", np.ones(1))])
    assert caught.value.exit_code == 2


def test_other_errors_are_bugs_and_stay_visible(tmp_path, monkeypatch):
    def broken(_):
        raise OSError(errno.EBADF, "bad")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="bad"):
        write_file(tmp_path / "w", b"")


def test_every_file_is_synced(tmp_path, monkeypatch):
    synced = []
    real = os.fsync

    def record(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    write_weights(tmp_path, entries_of(2, 10), None, 10)
    assert {os.path.basename(p) for p in synced} == {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        INDEX,
    }


def test_replacing_a_file_is_all_or_nothing(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    path.write_bytes(b"old")
    replace_file(path, b"new")
    assert path.read_bytes() == b"new"

    def full(*_):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(SpecExportError) as caught:
        replace_file(path, b"newer")
    assert caught.value.findings[0].code == "disk-full"
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]
    assert path.read_bytes() == b"new"
