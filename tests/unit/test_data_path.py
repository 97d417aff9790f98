"""Finding the data folders of a checkout, and of a package that is not one."""

from __future__ import annotations

from pathlib import Path

import pytest

from spec_export.layout import data

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["ckpt_templates", "recipes"])
def test_checkout(name: str) -> None:
    assert data.data_path(name) == ROOT / name


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty package where the code believes itself to be installed."""
    folder = tmp_path / "site-packages" / "spec_export"
    folder.mkdir(parents=True)
    monkeypatch.setattr(data.resources, "files", lambda _: folder)
    return folder


def test_installed_package_wins_over_a_neighbour(package: Path) -> None:
    (package / "_data" / "recipes").mkdir(parents=True)
    (package.parent / "recipes").mkdir()
    (package.parent / "pyproject.toml").touch()
    assert data.data_path("recipes") == package / "_data" / "recipes"


def test_a_strangers_folder_in_site_packages_is_not_ours(package: Path) -> None:
    (package.parent / "recipes").mkdir()
    with pytest.raises(FileNotFoundError, match="reinstall spec-export"):
        data.data_path("recipes")
