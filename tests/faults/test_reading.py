"""Damaged folders: a reader says so, and an export beside them works."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from spec_export.artifact.source import CheckpointSource
from spec_export.artifact.target import open_target
from spec_export.export import ExportOptions, export_source
from tests.faults.conftest import Desk
from tests.helpers.cli import spec_export

MANIFEST = "spec_export_manifest.json"
WEIGHTS = "model.safetensors"


def weights(folder: Path) -> Path:
    return next(iter(sorted(folder.glob("model*.safetensors"))))


def corrupt_header(folder: Path) -> None:
    data = bytearray(weights(folder).read_bytes())
    data[8] = ord("[")
    weights(folder).write_bytes(data)


def absurd_header(folder: Path) -> None:
    data = bytearray(weights(folder).read_bytes())
    data[:8] = (1 << 62).to_bytes(8, "little")
    weights(folder).write_bytes(data)


def truncated(folder: Path) -> None:
    data = weights(folder).read_bytes()
    weights(folder).write_bytes(data[: len(data) - 7])


def zeroed_tail(folder: Path) -> None:
    data = bytearray(weights(folder).read_bytes())
    data[-64:] = bytes(64)
    weights(folder).write_bytes(data)


def flipped_bit(folder: Path) -> None:
    data = bytearray(weights(folder).read_bytes())
    data[-100] ^= 1
    weights(folder).write_bytes(data)


def swapped_names(folder: Path) -> None:
    """Two tensors of one shape; the file is a perfect one to its library."""
    data = weights(folder).read_bytes()
    names = [f"midlayer.mlp.{n}_proj.weight".encode() for n in ("gate", "up")]
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    one, two = (name.decode() for name in names)
    header[one], header[two] = header[two], header[one]
    text = json.dumps(header, separators=(",", ":")).encode()
    assert len(text) <= size
    weights(folder).write_bytes(data[:8] + text.ljust(size) + data[8 + size :])
    assert {one, two} <= load_file(weights(folder)).keys()


def missing_shard(folder: Path) -> None:
    weights(folder).unlink()


def extra_shard(folder: Path) -> None:
    save_file({"extra": np.zeros(3, np.float32)}, folder / "extra.safetensors")


def manifest_alone(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        file.unlink()


def weights_of_another(folder: Path) -> None:
    other = folder.parent / "step-00000001"
    assert weights(other).read_bytes() != weights(folder).read_bytes()
    shutil.copyfile(weights(other), weights(folder))


DAMAGES: list[tuple[Callable[[Path], None], str, str]] = [
    (corrupt_header, WEIGHTS, "file-changed"),
    (absurd_header, WEIGHTS, "file-changed"),
    (truncated, WEIGHTS, "file-changed"),
    (zeroed_tail, WEIGHTS, "file-changed"),
    (flipped_bit, WEIGHTS, "file-changed"),
    (swapped_names, WEIGHTS, "file-changed"),
    (missing_shard, "model-00001-of", "file-missing"),
    (extra_shard, "extra.safetensors", "file-unlisted"),
    (manifest_alone, "", "file-missing"),
    (weights_of_another, WEIGHTS, "file-changed"),
]


@pytest.fixture
def output_dir(desk: Desk, tmp_path: Path) -> Path:
    out = tmp_path / "out"
    shutil.copytree(desk.template, out, symlinks=True)
    return out


@pytest.mark.parametrize(
    ("damage", "subject", "code"), DAMAGES, ids=[d[0].__name__ for d in DAMAGES]
)
def test_a_damaged_export_is_refused(
    desk: Desk,
    output_dir: Path,
    row: Any,
    damage: Callable[[Path], None],
    subject: str,
    code: str,
) -> None:
    source = CheckpointSource.open(desk.source)
    sharded = damage in (missing_shard, extra_shard, manifest_alone)
    options = ExportOptions(max_shard_size="400" if sharded else None)
    target = open_target(desk.target)
    old = output_dir / "step-00000002"
    first = output_dir / "step-00000001"
    shutil.copytree(old, first)
    place = output_dir / "step-00000003"
    folder = export_source(source, target, options, place, place="step").folder
    assert spec_export("verify", folder).code == 0
    damage(folder)
    ran = spec_export("verify", folder, "--files-only")
    assert ran.code == 1
    assert code in ran.codes("error")
    assert ran.finding(code)["subject"].startswith(subject)
    assert spec_export("finalize", folder, "--no-compare").code == 1
    assert spec_export("verify", old).code == 0
    # The same step again: the damaged one has the name, its bytes are others.
    again = export_source(source, target, options, place, place="step").folder
    assert spec_export("verify", again).code == 0
    row(damage.__name__.replace("_", " "), f"refused ({code}), the old one verifies")


def test_weights_without_a_manifest_are_no_export(
    desk: Desk, output_dir: Path, row: Any
) -> None:
    folder = output_dir / "step-00000002"
    (folder / MANIFEST).unlink()
    ran = spec_export("verify", folder, "--files-only")
    assert ran.code == 1
    assert spec_export("finalize", folder, "--no-compare").code == 2
    row("weights without a manifest", "refused")


@pytest.mark.parametrize(
    "damage", [corrupt_header, absurd_header, truncated, missing_shard]
)
def test_a_damaged_checkpoint_leaves_no_export(
    desk: Desk, tmp_path: Path, row: Any, damage: Callable[[Path], None]
) -> None:
    source = tmp_path / "source"
    shutil.copytree(desk.source, source)
    damage(source)
    ran = spec_export("finalize", source, "--no-compare", "--output", tmp_path / "out")
    assert ran.code in (1, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]
    row(f"checkpoint: {damage.__name__.replace('_', ' ')}", "refused, nothing written")
