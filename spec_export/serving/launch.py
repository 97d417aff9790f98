"""The server command of an export, ready to copy."""

from __future__ import annotations

import shlex
from pathlib import Path

from spec_export.artifact.manifest import Manifest


def launch_argv(manifest: Manifest, folder: Path, target: str | None) -> list[str]:
    """The arguments that start SGLang with an export.

    Args:
        manifest: The export's.
        folder: Where the export lies.
        target: Path or hub id; by default the name that the manifest records.
    """
    model = target or manifest.target_model.name or "TARGET"
    words = {"{draft}": str(folder), "{target}": model}
    tail = [words.get(argument, argument) for argument in manifest.serving.launch]
    return ["python", "-m", "sglang.launch_server", "--model-path", model, *tail]


def launch_line(manifest: Manifest, folder: Path, target: str | None) -> str:
    """``launch_argv`` for a shell."""
    return shlex.join(launch_argv(manifest, folder, target))
