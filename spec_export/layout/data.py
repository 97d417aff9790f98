"""Where the templates and recipes are: in a checkout and in an installed wheel."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml

# libyaml's parser is ten times faster, and every command waits for the templates.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_PACKAGE = "spec_export"


def data_path(name: Literal["ckpt_templates", "recipes"]) -> Path:
    """Find a data folder.

    An installed wheel holds it as ``spec_export/_data/<name>``; that is asked first,
    since a stranger's ``recipes`` may lie beside an installed package. A checkout has
    it at the top, beside the package.

    Args:
        name: ``ckpt_templates`` or ``recipes``.

    Returns:
        The folder.

    Raises:
        FileNotFoundError: The installation is incomplete.
    """
    package = Path(str(resources.files(_PACKAGE)))
    candidates = [package / "_data" / name]
    if (package.parent / "pyproject.toml").is_file():
        candidates.append(package.parent / name)
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    places = " or ".join(str(candidate) for candidate in candidates)
    raise FileNotFoundError(f"{name} is not at {places}: reinstall spec-export")


def read_yaml(path: Path) -> Any:
    """A YAML file of ours.

    Raises:
        OSError, yaml.YAMLError: it cannot be read.
    """
    return yaml.load(path.read_text(), _LOADER)
