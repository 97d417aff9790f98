"""What tests of the judge do to an export, and whom they ask."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from spec_export.artifact.source import CheckpointSource
from spec_export.artifact.target import open_target
from spec_export.comparison import judge_of_checkpoint, leg_of_probe
from spec_export.export import ExportOptions, ExportResult, export_source
from spec_export.judge import Leg
from tests.helpers.cli import spec_export

Config = dict[str, Any]
Tensors = dict[str, torch.Tensor]


def edit(folder: Path, change: Callable[[Config], None], name: str = "config") -> None:
    path = folder / f"{name}.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def judged(checkpoint: Path, target: Path, folder: Path) -> Leg:
    source = CheckpointSource.open(checkpoint)
    judge = judge_of_checkpoint(source, open_target(target), "cpu", None)
    return judge(folder)["layout"]


def probed(target: Path, folder: Path) -> Leg:
    return leg_of_probe(folder, open_target(target), "cpu", None)


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to))


def finalized(checkpoint: Path, target: Path, out: Path, *more: str) -> Any:
    return spec_export(
        *("finalize", checkpoint, "--target", target, "--output", out, *more)
    )


def exported(root: Path, **options: Any) -> tuple[ExportResult, Leg]:
    """``checkpoint`` to ``export`` for ``target``, and what the judge says of it."""
    source = CheckpointSource.open(root / "checkpoint")
    target = open_target(root / "target")
    legs: dict[str, Leg] = {}
    judge = judge_of_checkpoint(source, target, "cpu", None)

    def kept(folder: Path) -> Mapping[str, Leg]:
        legs.update(judge(folder))
        return legs

    result = export_source(
        source, target, ExportOptions(**options), root / "export", judge=kept
    )
    return result, legs["layout"]


def judged_again(
    root: Path, out: Path, change: Callable[[Tensors, Config], Any]
) -> Leg:
    """A changed copy of ``export``, held against the checkpoint it was made from."""
    shutil.copytree(root / "export", out)
    tensors = load_file(out / "model.safetensors")
    edit(out, lambda config: change(tensors, config))
    save_file(
        {name: value.contiguous().clone() for name, value in tensors.items()},
        out / "model.safetensors",
        {"format": "pt"},
    )
    return judged(root / "checkpoint", root / "target", out)
