"""The built distributions: they hold the data folders and work outside a checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DATA = ("ckpt_templates", "recipes")
WHERE = """
import json, spec_export
from spec_export.layout.data import data_path
print(json.dumps({
    "package": spec_export.__file__,
    **{name: str(data_path(name)) for name in ("ckpt_templates", "recipes")},
}))
"""


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **env},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def checkout_files() -> set[str]:
    """The files of the data folders, by their name from the root."""
    return {
        str(path.relative_to(ROOT))
        for name in DATA
        for path in (ROOT / name).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was made from that sdist."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, cwd=ROOT)
    return out


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, installed into a folder of its own without its dependencies."""
    target = tmp_path_factory.mktemp("site")
    run(
        *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"),
        *("--target", target, next(built.glob("*.whl"))),
        cwd=target,
    )
    return target


def test_sdist_holds_the_data(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    assert checkout_files() <= names
    assert {"LICENSE", "README.md", "pyproject.toml"} <= names


def test_wheel_holds_the_package_and_the_data_and_nothing_else(built: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as archive:
        names = set(archive.namelist())
        metadata = next(name for name in names if name.endswith("/METADATA"))
        text = archive.read(metadata).decode()
    prefix = "spec_export/_data/"
    data = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
    assert data == checkout_files()
    assert {"ckpt_templates", "recipes"} == {name.split("/")[0] for name in data}
    assert all(name.split("/")[0].startswith("spec_export") for name in names)
    assert "License-Expression: Apache-2.0" in text
    base = [
        line
        for line in text.splitlines()
        if line.startswith("Requires-Dist:") and "extra ==" not in line
    ]
    assert base
    assert not any("torch" in line or "speculators" in line for line in base)


def test_installed_wheel_finds_its_own_data(installed: Path, tmp_path: Path) -> None:
    # A folder of the user with the name of one of ours must not be taken.
    (tmp_path / "recipes").mkdir()
    out = run(sys.executable, "-c", WHERE, cwd=tmp_path, PYTHONPATH=str(installed))
    where = json.loads(out)
    # The editable install of the test environment is not what ran.
    assert where["package"] == str(installed / "spec_export" / "__init__.py")
    for name in DATA:
        folder = Path(where[name])
        assert folder == installed / "spec_export" / "_data" / name
        assert any(folder.iterdir())


def test_command_of_the_installed_wheel(installed: Path, tmp_path: Path) -> None:
    script = installed / "bin" / "spec-export"
    out = run(script, "--help", cwd=tmp_path, PYTHONPATH=str(installed))
    assert "finalize" in out
    assert "verify" in out
