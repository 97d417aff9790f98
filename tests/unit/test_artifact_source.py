"""Checkpoints are opened from headers, and what is broken is named."""

import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save_file

from spec_export.artifact.header import read_header
from spec_export.artifact.resolve import resolve_source
from spec_export.artifact.source import CheckpointSource, epoch_number
from spec_export.artifact.weights import INDEX, SINGLE, WeightFiles
from spec_export.findings import SpecExportError

CONFIG = {"speculators_model_type": "eagle3", "speculators_version": "0.9.0"}


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "fc.weight": rng.normal(size=(8, 24)).astype(np.float32),
        "norm.weight": np.ones(8, np.float32),
        "d2t": np.arange(12, dtype=np.int64),
        "t2d": np.ones(32, dtype=np.bool_),
    }


def checkpoint(folder: Path, values: dict | None = None, config=CONFIG) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors() if values is None else values, folder / SINGLE)
    return folder


def sharded(folder: Path, shards: dict[str, dict], weight_map: dict) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for file, content in shards.items():
        save_file(content, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def raw_file(path: Path, header: object, data: bytes = b"", length=None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(
        struct.pack("<Q", len(text) if length is None else length) + text + data
    )
    return path


def failure(call, *args, exit_code=1):
    with pytest.raises(SpecExportError) as caught:
        call(*args)
    assert caught.value.exit_code == exit_code
    return caught.value.findings


# --- the header reader


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


BROKEN = {
    "empty file": (b"", None),
    "seven bytes": (b"\0" * 7, None),
    "no object": (struct.pack("<Q", 2) + b"[]", None),
    "no json": (struct.pack("<Q", 3) + b"{x}", None),
    "not utf-8": (struct.pack("<Q", 4) + b'{"\xff', None),
    "header beyond the end": (struct.pack("<Q", 50) + b"{}", None),
    "huge header": (struct.pack("<Q", 1 << 62) + b"{}", None),
    "deep nesting": (struct.pack("<Q", 200_001) + b"{" + b"[" * 200_000, None),
    "unknown dtype": ({"a": entry("F33")}, 8),
    "negative shape": ({"a": entry(shape=(-2,))}, 8),
    "boolean shape": ({"a": entry(shape=(True, 2))}, 8),
    "range too short": ({"a": entry(offsets=(0, 4))}, 4),
    "range too long": ({"a": entry(offsets=(0, 16))}, 16),
    "reversed range": ({"a": entry(offsets=(8, 0))}, 8),
    "truncated data": ({"a": entry()}, 5),
    "trailing bytes": ({"a": entry()}, 9),
    "a hole": ({"a": entry(), "b": entry(offsets=(16, 24))}, 24),
    "an overlap": ({"a": entry(), "b": entry(offsets=(4, 12))}, 12),
    "same range": ({"a": entry(), "b": entry()}, 8),
    "twice": (b'{"a":%s,"a":%s}' % ((json.dumps(entry()).encode(),) * 2), 8),
    "entry is no object": ({"a": 3}, 0),
    "metadata number": ({"__metadata__": {"a": 1}, "a": entry()}, 8),
    "half a byte": ({"a": entry("F4", (3,), (0, 1))}, 1),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_header_is_refused(tmp_path, name):
    content, data = BROKEN[name]
    path = tmp_path / "w.safetensors"
    if data is None:
        path.write_bytes(content)
    else:
        raw_file(path, content, b"\0" * data)
    (found,) = failure(read_header, path)
    assert found.code == "file-corrupt"
    assert found.subject == "w.safetensors"


def test_a_sound_header_passes(tmp_path):
    header = {
        "__metadata__": {"format": "pt"},
        "b": entry(offsets=(8, 16)),
        "a": entry(),
        "none": entry(shape=(0, 3), offsets=(16, 16)),
        "scalar": entry("I64", (), (16, 24)),
    }
    read = read_header(raw_file(tmp_path / "w.safetensors", header, b"\0" * 24))
    assert read.metadata == {"format": "pt"}
    assert read.tensors["scalar"].info.shape == ()
    assert read.tensors["b"].end - read.tensors["b"].start == 8


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_agrees_with_the_library_about_mutated_files(tmp_path_factory, data):
    """Whatever the library refuses is refused, and the other way round."""
    base = json.dumps(
        {"a": entry(), "b": entry("BF16", (2, 3), (8, 20)), "__metadata__": {"x": "y"}}
    ).encode()
    content = bytearray(struct.pack("<Q", len(base)) + base + b"\0" * 20)
    for _ in range(data.draw(st.integers(0, 2))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] = data.draw(st.sampled_from(b'0123456789[]{}",:abF \0\xff'))
    content = content[: len(content) - data.draw(st.sampled_from([0, 0, 0, 1, 20]))]
    path = tmp_path_factory.getbasetemp() / "mutated.safetensors"
    path.write_bytes(content)
    try:
        deserialize(bytes(content))
        theirs = True
    except SafetensorError:
        theirs = False
    try:
        read_header(path)
        ours = True
    except SpecExportError:
        ours = False
    assert ours == theirs


# --- a checkpoint


def test_values_are_views_of_the_file(tmp_path):
    source = CheckpointSource.open(checkpoint(tmp_path / "0"))
    assert list(source.tensors) == sorted(tensors())
    for name, expected in tensors().items():
        read = source.read(name)
        assert read.dtype == expected.dtype
        assert np.array_equal(read, expected)
        assert not read.flags.writeable
        assert not read.flags.owndata
    assert source.config["speculators_model_type"] == "eagle3"
    assert source.label == "0"
    assert source.check_unchanged() == []


def test_bfloat16_is_read_as_bfloat16(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    values = np.array([1.5, -2.0], dtype=ml_dtypes.bfloat16)
    raw_file(tmp_path / SINGLE, {"a": entry("BF16", (2,), (0, 4))}, values.tobytes())
    read = CheckpointSource.open(tmp_path).read("a")
    assert read.dtype == ml_dtypes.bfloat16
    assert np.array_equal(read, values)


def test_shards_are_one_set_of_tensors(tmp_path):
    values = tensors()
    folder = sharded(
        tmp_path / "s",
        {
            "model-00001-of-00002.safetensors": {"fc.weight": values["fc.weight"]},
            "model-00002-of-00002.safetensors": {"d2t": values["d2t"]},
        },
        {
            "fc.weight": "model-00001-of-00002.safetensors",
            "d2t": "model-00002-of-00002.safetensors",
        },
    )
    source = CheckpointSource.open(folder)
    assert np.array_equal(source.read("d2t"), values["d2t"])
    assert source.findings == []


def test_a_missing_shard_is_named(tmp_path):
    folder = sharded(
        tmp_path / "s",
        {"a.safetensors": {"x": np.ones(2, np.float32)}},
        {"x": "a.safetensors", "y": "b.safetensors", "z": "c.safetensors"},
    )
    found = failure(CheckpointSource.open, folder)
    assert [(f.code, f.subject) for f in found] == [
        ("file-missing", "b.safetensors"),
        ("file-missing", "c.safetensors"),
    ]


def test_an_index_that_lies_about_a_shard(tmp_path):
    folder = sharded(
        tmp_path / "s",
        {
            "a.safetensors": {"x": np.ones(2, np.float32)},
            "b.safetensors": {"y": np.ones(2, np.float32)},
        },
        {"x": "b.safetensors", "y": "b.safetensors", "z": "a.safetensors"},
    )
    found = failure(CheckpointSource.open, folder)
    assert {(f.code, f.subject) for f in found} >= {
        ("file-contradiction", "x"),
        ("file-contradiction", "z"),
    }


def test_an_index_that_forgets_a_tensor(tmp_path):
    folder = sharded(
        tmp_path / "s",
        {"a.safetensors": {"x": np.ones(2, np.float32), "y": np.ones(2, np.float32)}},
        {"x": "a.safetensors"},
    )
    (found,) = failure(CheckpointSource.open, folder)
    assert (found.code, found.subject) == ("file-contradiction", "y")


@pytest.mark.parametrize("second", [1.0, 2.0])
def test_one_name_in_two_shards(tmp_path, second):
    folder = sharded(
        tmp_path / "s",
        {
            "a.safetensors": {"x": np.ones(2, np.float32)},
            "b.safetensors": {
                "x": np.full(2, second, np.float32),
                "y": np.ones(2, np.float32),
            },
        },
        {"x": "a.safetensors", "y": "b.safetensors"},
    )
    if second == 1.0:
        assert set(CheckpointSource.open(folder).tensors) == {"x", "y"}
    else:
        (found,) = failure(CheckpointSource.open, folder)
        assert (found.code, found.subject) == ("file-contradiction", "x")


def test_a_left_over_single_file_with_other_values(tmp_path):
    folder = sharded(
        tmp_path / "s",
        {
            "a.safetensors": {"x": np.ones(2, np.float32)},
            SINGLE: {"x": np.zeros(2, np.float32)},
        },
        {"x": "a.safetensors"},
    )
    (found,) = failure(CheckpointSource.open, folder)
    assert (found.code, found.subject) == ("file-contradiction", "x")
    assert SINGLE in found.message


def test_strays_are_named_and_not_read(tmp_path):
    folder = checkpoint(tmp_path / "0")
    save_file({"other": np.ones(1, np.float32)}, folder / "adapter.safetensors")
    (folder / "torn.safetensors").write_bytes(b"\1\2")
    (folder / "optimizer_state_dict.pt").write_bytes(b"x")
    np.save(folder / "d2t.npy", np.arange(3))
    source = CheckpointSource.open(folder)
    assert set(source.tensors) == set(tensors())
    assert {f.subject for f in source.findings} == {
        "adapter.safetensors",
        "torn.safetensors",
        "optimizer_state_dict.pt",
        "d2t.npy",
    }
    assert {f.code for f in source.findings} == {"export-ignored"}


@pytest.mark.parametrize(
    "file", ["../x.safetensors", "/x.safetensors", "a/../../x.safetensors", ""]
)
def test_an_index_cannot_leave_the_folder(tmp_path, file):
    save_file({"x": np.ones(1, np.float32)}, tmp_path / "x.safetensors")
    folder = sharded(tmp_path / "s", {}, {"x": file})
    (found,) = failure(CheckpointSource.open, folder)
    assert found.code == "path-escape"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": [1]}', "\xff{"])
def test_a_broken_index(tmp_path, text):
    folder = checkpoint(tmp_path / "0")
    (folder / INDEX).write_bytes(text.encode("latin-1"))
    (found,) = failure(CheckpointSource.open, folder)
    assert (found.code, found.subject) == ("file-corrupt", INDEX)


WRAPPED = [
    "layers.0._orig_mod.mlp.down_proj.weight",
    "module.layers.0.mlp.down_proj.weight",
    "_fsdp_wrapped_module.layers.0.mlp.down_proj.weight",
]


@pytest.mark.parametrize("wrapped", WRAPPED)
@pytest.mark.parametrize("same", [True, False])
def test_a_wrapped_copy(tmp_path, wrapped, same):
    clean = "layers.0.mlp.down_proj.weight"
    values = {
        clean: np.ones((2, 2), np.float32),
        wrapped: np.full((2, 2), 1 if same else 2, np.float32),
    }
    folder = checkpoint(tmp_path / "0", values)
    if same:
        source = CheckpointSource.open(folder)
        assert list(source.tensors) == [clean]
        assert [f.subject for f in source.findings] == [wrapped]
    else:
        (found,) = failure(CheckpointSource.open, folder)
        assert (found.code, found.subject) == ("file-contradiction", clean)
        assert wrapped in found.message


def test_a_wrapped_name_alone_is_left_for_the_plan(tmp_path):
    folder = checkpoint(tmp_path / "0", {WRAPPED[0]: np.ones(2, np.float32)})
    assert list(CheckpointSource.open(folder).tensors) == [WRAPPED[0]]


@pytest.mark.parametrize("broken", ["truncated", "config", "bin", "nothing", "absent"])
def test_what_is_no_checkpoint(tmp_path, broken):
    folder = checkpoint(tmp_path / "0")
    if broken == "truncated":
        data = (folder / SINGLE).read_bytes()
        (folder / SINGLE).write_bytes(data[:-1])
        (found,) = failure(CheckpointSource.open, folder)
        assert (found.code, found.subject) == ("file-corrupt", SINGLE)
        assert "truncated" in found.message
    elif broken == "config":
        (folder / "config.json").write_text("{")
        (found,) = failure(CheckpointSource.open, folder)
        assert (found.code, found.subject) == ("file-corrupt", "config.json")
    elif broken == "bin":
        (folder / SINGLE).rename(folder / "pytorch_model.bin")
        (found,) = failure(CheckpointSource.open, folder, exit_code=2)
        assert found.subject == "pytorch_model.bin"
        assert "safetensors" in found.message
    elif broken == "nothing":
        (folder / SINGLE).unlink()
        (found,) = failure(CheckpointSource.open, folder, exit_code=2)
        assert found.code == "path-missing"
    else:
        (found,) = failure(CheckpointSource.open, tmp_path / "9", exit_code=2)
        assert found.code == "path-missing"


def test_a_file_that_is_replaced_meanwhile_is_noticed(tmp_path):
    folder = checkpoint(tmp_path / "0")
    source = CheckpointSource.open(folder)
    save_file(tensors(), tmp_path / "new")
    (tmp_path / "new").replace(folder / SINGLE)
    (found,) = source.check_unchanged()
    assert (found.code, found.subject) == ("file-changed", SINGLE)


def test_every_file_is_read_as_sglang_does(tmp_path):
    folder = checkpoint(tmp_path / "0")
    save_file({"other": np.ones(1, np.float32)}, folder / "x.safetensors")
    assert "other" not in WeightFiles.open(folder).tensors
    assert "other" in WeightFiles.open(folder, every_file=True).tensors


# --- its record


def test_the_record_of_a_bare_checkpoint(tmp_path):
    folder = checkpoint(tmp_path / "2")
    (folder / "training_state.json").write_text(
        '{"epoch": 2, "local_step": 0, "global_step": 450}'
    )
    (folder / "val_metrics.json").write_text('{"loss_epoch": 1.5}')
    (folder / "train_command.txt").write_text(
        "# Timestamp: now\n# Git SHA: abc\n# speculators: 0.9.0\n"
        "# vllm: not installed\n# torch: 2.13.0\npython /home/someone/train.py\n"
    )
    (tmp_path / "run.yaml").write_text(
        "train:\n  draft: {norm_before_residual: false}\n"
    )
    record = CheckpointSource.open(folder).record
    assert (record.epoch, record.global_step) == (2, 450)
    assert record.metrics == {"loss_epoch": 1.5}
    assert record.speculators_version == "0.9.0"
    assert record.packages == {"speculators": "0.9.0", "torch": "2.13.0"}
    assert record.recipe == {"train": {"draft": {"norm_before_residual": False}}}
    assert len(record.recipe_digest) == 64
    assert record.requires_grad is record.in_optimizer is record.changed is None


def test_a_torn_record_is_an_empty_one(tmp_path):
    folder = checkpoint(tmp_path / "ckpt", config={})
    for name in ("training_state.json", "val_metrics.json"):
        (folder / name).write_text('{"epoch": ')
    (folder / "run.yaml").write_text("train: [")
    record = CheckpointSource.open(folder).record
    assert (record.epoch, record.global_step, record.recipe) == (None, None, None)
    assert record.metrics == {}


def test_a_stranger_beside_the_checkpoint_is_not_its_recipe(tmp_path):
    (tmp_path / "run.yaml").write_text("train: {}\n")
    assert CheckpointSource.open(checkpoint(tmp_path / "x")).record.recipe is None
    assert CheckpointSource.open(checkpoint(tmp_path / "1")).record.recipe is not None


@pytest.mark.parametrize("name", ["007", "+4", "2024_01", " 7", "٣", "-1", "1.0"])
def test_folders_that_speculators_would_not_write(name):
    assert epoch_number(name) is None
    assert epoch_number("10") == 10


# --- which folder a path stands for


def test_a_checkpoint_is_itself(tmp_path):
    found = resolve_source(checkpoint(tmp_path / "0"))
    assert (found.kind, found.folder.name) == ("checkpoint", "0")


def test_best_goes_before_newest(tmp_path):
    for epoch in (0, 1, 10, 9):
        checkpoint(tmp_path / str(epoch))
    assert resolve_source(tmp_path).folder.name == "10"
    (tmp_path / "checkpoint_best").symlink_to("1")
    found = resolve_source(tmp_path)
    assert (found.kind, found.folder.name) == ("run", "1")
    assert "checkpoint_best" in found.why
    assert [f.code for f in found.findings] == ["checkpoint-chosen"]


def test_incomplete_epochs_are_passed_over_and_named(tmp_path):
    checkpoint(tmp_path / "0")
    (checkpoint(tmp_path / "1") / "config.json").unlink()
    torn = checkpoint(tmp_path / "2") / SINGLE
    torn.write_bytes(torn.read_bytes()[:-3])
    (tmp_path / "3").mkdir()
    (tmp_path / "007").mkdir()
    (tmp_path / "checkpoint_best").symlink_to("5")
    found = resolve_source(tmp_path)
    assert found.folder.name == "0"
    assert [f.subject for f in found.findings if f.code == "checkpoint-incomplete"] == [
        "checkpoint_best",
        "3",
        "2",
        "1",
    ]


def test_interrupted_only_when_nothing_else(tmp_path):
    checkpoint(tmp_path / "interrupted")
    assert resolve_source(tmp_path).folder.name == "interrupted"
    checkpoint(tmp_path / "0")
    assert resolve_source(tmp_path).folder.name == "0"


def test_a_dry_run_in_the_root_does_not_hide_what_was_trained(tmp_path):
    checkpoint(tmp_path)
    assert resolve_source(tmp_path).kind == "checkpoint"
    checkpoint(tmp_path / "0")
    assert resolve_source(tmp_path).folder.name == "0"


def test_no_complete_epoch_is_an_answer_of_no(tmp_path):
    torn = checkpoint(tmp_path / "0") / SINGLE
    torn.write_bytes(torn.read_bytes()[:-3])
    found = failure(resolve_source, tmp_path)
    assert {f.subject for f in found} == {"0", tmp_path.name}


@pytest.mark.parametrize("kind", ["absent", "file", "empty", "config only"])
def test_where_there_is_no_model(tmp_path, kind):
    path = tmp_path / "x"
    if kind == "file":
        path.write_text("")
    elif kind != "absent":
        path.mkdir()
    if kind == "config only":
        (path / "config.json").write_text("{}")
    (found,) = failure(resolve_source, path, exit_code=2)
    assert (found.code, found.subject) == ("path-missing", "x")


def export(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "spec_export_manifest.json").write_text("{}")
    return folder


def test_an_export_is_itself(tmp_path):
    assert resolve_source(export(tmp_path / "e")).kind == "export"


def test_an_output_dir_stands_for_best_else_latest_else_newest(tmp_path):
    for name in ("step-00000900", "step-00000450", "step-00000450.2"):
        export(tmp_path / name)
    export(tmp_path / "step-00001000.failed")
    (tmp_path / "step-00002000").mkdir()  # no manifest: not an export
    newest = resolve_source(tmp_path)
    assert (newest.kind, newest.folder.name) == ("output_dir", "step-00000900")
    (tmp_path / "latest").symlink_to("step-00000450.2")
    assert resolve_source(tmp_path).folder.name == "step-00000450.2"
    (tmp_path / "best").symlink_to("step-00000450")
    assert resolve_source(tmp_path).folder.name == "step-00000450"
    (tmp_path / "best").unlink()
    (tmp_path / "best").symlink_to("step-00000001")
    dangling = resolve_source(tmp_path)
    assert dangling.folder.name == "step-00000450.2"
    assert [f.subject for f in dangling.findings] == ["best", "step-00000450.2"]


def test_an_output_dir_of_failures(tmp_path):
    export(tmp_path / "step-00000450.failed")
    (found,) = failure(resolve_source, tmp_path)
    assert found.code == "export-failed-status"
