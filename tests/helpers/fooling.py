"""What the attempts to fool the judge do to an export, and whom they ask."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spec_export.artifact.source import CheckpointSource
from spec_export.artifact.target import open_target
from spec_export.comparison import judge_of_checkpoint, leg_of_probe
from spec_export.judge import Leg
from tests.helpers.cli import spec_export

Config = dict[str, Any]


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
