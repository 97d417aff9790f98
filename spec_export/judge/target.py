"""The target: its configuration, and the tensors that a draft borrows from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

_EMBEDDING = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight")
_HEAD = ("lm_head.weight", "output.weight")
_OTHER_TOWERS = ("vision", "visual", "audio", "mtp", "draft")


class TargetUnreadable(ValueError):
    """A tensor of the target is not there in a form that can be read."""


def language_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of the language model inside a multimodal one."""
    for key in ("text_config", "llm_config", "language_config"):
        inner = config.get(key)
        if isinstance(inner, Mapping):
            return inner
    return config


def _files(folder: Path) -> dict[str, Path]:
    """Name of each tensor of the target -> its file."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = json.loads(index.read_text())["weight_map"]
        return {name: folder / file for name, file in names.items()}
    out = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as handle:
            out.update(dict.fromkeys(handle.keys(), file))
    return out


def _find(files: dict[str, Path], endings: tuple[str, ...]) -> str | None:
    """The shortest name of the text model that ends so."""
    fitting = [
        name
        for ending in endings
        for name in files
        if (name == ending or name.endswith(f".{ending}"))
        and not any(word in name for word in _OTHER_TOWERS)
    ]
    return min(fitting, key=len, default=None)


def target_tensors(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Embedding and head of a target, [vocabulary, H] each, mapped from disk.

    Raises:
        TargetUnreadable: no such tensor, or a packed one.
    """
    files = _files(folder)
    embed_name = _find(files, _EMBEDDING)
    if embed_name is None:
        raise TargetUnreadable(
            f"no embedding among {len(files)} tensors of {folder.name}"
        )
    head_name = _find(files, _HEAD) or embed_name
    return _read(files, embed_name), _read(files, head_name)


def target_norm(folder: Path) -> torch.Tensor | None:
    """Weight of the target's final norm [H], None where the folder lacks it."""
    files = _files(folder)
    name = _find(files, ("norm.weight",))
    if name is None or not files[name].is_file():
        return None
    with safe_open(files[name], framework="pt") as handle:
        weight: torch.Tensor = handle.get_tensor(name)
    return weight


def _read(files: dict[str, Path], name: str) -> torch.Tensor:
    file = files[name]
    if not file.is_file():
        raise TargetUnreadable(f"{file.name}, which holds {name}, is not there")
    with safe_open(file, framework="pt") as handle:
        tensor: torch.Tensor = handle.get_tensor(name)
    if not tensor.is_floating_point() or tensor.ndim != 2:
        raise TargetUnreadable(f"{name} is packed ({tensor.dtype}, {tensor.ndim}-D)")
    return tensor
