"""What differs between two exports: tensors, configuration, facts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spec_export.artifact.manifest import Manifest
from spec_export.artifact.weights import read_json
from spec_export.layout.config import flatten

# Facts of the manifest that are compared besides tensors and config.json.
_FACTS = ("status", "serving", "target_model", "vocab", "training")


def diff(a: Path, b: Path) -> list[dict[str, Any]]:
    """Compare two exports by their manifests and config.json.

    Args:
        a: An export.
        b: Another one.

    Returns:
        One entry for each difference: ``kind`` (``tensor``, ``config`` or
        ``fact``), ``name``, and the two values (None where one side lacks it).

    Raises:
        SpecExportError: exit 1 for a folder without a readable manifest.
    """
    first, second = Manifest.read(a), Manifest.read(b)
    out = []
    for name in sorted(set(first.tensors) | set(second.tensors)):
        x, y = first.tensors.get(name), second.tensors.get(name)
        left = None if x is None else x.model_dump(include=_TENSOR)
        right = None if y is None else y.model_dump(include=_TENSOR)
        if left != right:
            out.append({"kind": "tensor", "name": name, "a": left, "b": right})
    out += _differences(
        "config", read_json(a / "config.json"), read_json(b / "config.json")
    )
    x_facts, y_facts = first.to_json(), second.to_json()
    for key in _FACTS:
        out += _differences("fact", {key: x_facts[key]}, {key: y_facts[key]})
    return out


_TENSOR = {"role", "dtype", "shape", "sha256"}


def _differences(
    kind: str, a: dict[str, Any], b: dict[str, Any]
) -> list[dict[str, Any]]:
    x, y = flatten(a), flatten(b)
    return [
        {"kind": kind, "name": key, "a": x.get(key), "b": y.get(key)}
        for key in sorted(set(x) | set(y))
        if x.get(key) != y.get(key)
    ]
