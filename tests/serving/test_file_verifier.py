"""SGLang's own ``model_file_verifier`` takes our manifest for its list of checksums.

The module is run as a script, from its file: importing the package around it would
start half of SGLang.
"""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import field
from tests.helpers.cli import spec_export
from tests.serving.sglang_process import sglang_environment, sglang_python

MANIFEST = "spec_export_manifest.json"
WHERE = "import importlib.util as u; print(u.find_spec('sglang').origin)"
Edit = Callable[[Path], object]


@functools.cache
def verifier() -> Path:
    """The module's file in the installed SGLang."""
    done = subprocess.run(
        [sglang_python(), "-c", WHERE],
        env=sglang_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return Path(done.stdout.strip()).parent / "srt/utils/model_file_verifier.py"


def sglang_verifies(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sglang_python(), verifier(), "verify"),
            *("--model-path", folder, "--model-checksum", folder / MANIFEST),
        ],
        env=sglang_environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """In two shards, with an index and a model card."""
    target = field.make_target(tmp_path / "T0")
    draft, out = field.make_draft(tmp_path / "E0", target), tmp_path / "out"
    ran = spec_export(
        *("finalize", draft, "--output", out, "--no-compare", "--max-shard-size", "2KB")
    )
    assert ran.code == 0
    return out


def test_an_export_is_accepted(export: Path) -> None:
    files = json.loads((export / MANIFEST).read_text())["files"]
    assert set(files) == {p.name for p in export.iterdir()} - {MANIFEST}
    assert len(files) > 4
    done = sglang_verifies(export)
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"All {len(files)} files verified" in done.stdout


def flip(path: Path) -> None:
    """Another last byte: the size and the header stay."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "edit", "says"),
    [
        ("model-00002-of-00002.safetensors", flip, "mismatch"),
        ("config.json", flip, "mismatch"),
        ("model-00001-of-00002.safetensors", Path.unlink, "missing"),
    ],
)
def test_a_changed_file_is_refused_by_name(
    export: Path, name: str, edit: Edit, says: str
) -> None:
    edit(export / name)
    done = sglang_verifies(export)
    assert done.returncode != 0
    assert f"{name}: {says}" in done.stderr
