"""A draft as speculators left it on disk, opened from headers, and its record."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from spec_export.artifact.disk import read_regular
from spec_export.artifact.weights import WeightFiles, has_weights, read_json
from spec_export.findings import (
    Finding,
    SpecExportError,
    error,
    info,
    usage_error,
)
from spec_export.layout.tensors import TensorInfo

# Names that torch.compile, FSDP and activation checkpointing put into keys, and
# the one that DistributedDataParallel puts before them.
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_DDP = "module."

# What an exporter reads from a checkpoint folder; the rest is named, not copied.
_KNOWN_FILES = frozenset(
    {
        "config.json",
        "config.py",
        "train_command.txt",
        "training_state.json",
        "val_metrics.json",
        "run.yaml",
        "generation_config.json",
        "README.md",
    }
)


@dataclass
class TrainingRecord:
    """What is known about the training that made a source.

    Attributes:
        run_id: Identifies the run; None where nothing recorded one.
        speculators_version: The release that wrote the weights.
        global_step: Optimizer steps so far.
        epoch: Counted from 0.
        metrics: Validation metrics of this state.
        recipe: What the user asked for, as read; scrub before it travels.
        recipe_digest: SHA-256 of the recipe file's bytes.
        packages: Package versions by name.
        requires_grad: By source tensor; None where no live module was seen.
        in_optimizer: By source tensor; None where no live module was seen.
        changed: By source tensor, whether it moved since the first step; None
            where the first step was not seen.
    """

    run_id: str | None = None
    speculators_version: str | None = None
    global_step: int | None = None
    epoch: int | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] | None = None
    recipe_digest: str | None = None
    packages: dict[str, str] = field(default_factory=dict)
    requires_grad: dict[str, bool] | None = None
    in_optimizer: dict[str, bool] | None = None
    changed: dict[str, bool] | None = None


class Source(Protocol):
    """A draft as speculators holds it: a checkpoint, or a snapshot in training.

    Attributes:
        config: Content of speculators' config.json.
        tensors: Name, dtype and shape by name.
        record: What is known about its training.
        label: How messages name it; no absolute path.
    """

    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    record: TrainingRecord
    label: str

    def read(self, name: str) -> np.ndarray:
        """The values of a tensor, C contiguous, possibly a read-only view."""
        ...


class CheckpointSource:
    """A speculators checkpoint folder; no tensor is loaded before it is read.

    Attributes:
        folder: The checkpoint.
        config, tensors, record, label: As in ``Source``.
        findings: What is worth knowing: files that are not copied.
    """

    def __init__(self, folder: Path, config: dict[str, Any], files: WeightFiles):
        self.folder = folder
        self.config = config
        self.label = folder.name
        self.findings: list[Finding] = list(files.findings)
        self._files = files
        self.tensors = self._without_wrapped_copies()
        self.record = read_record(folder, config)
        self.findings += _left_out(folder)

    @classmethod
    def open(cls, folder: str | Path) -> CheckpointSource:
        """Open a checkpoint folder and check all that the headers tell.

        Raises:
            SpecExportError: exit 2 ``path-missing`` without config or weights;
                exit 1 for files that are missing, corrupt or contradict each
                other.
        """
        folder = Path(folder).resolve()
        if not folder.is_dir():
            raise usage_error("path-missing", folder.name, f"{folder} is no folder")
        config = read_json(folder / "config.json")
        return cls(folder, config, WeightFiles.open(folder))

    def read(self, name: str) -> np.ndarray:
        """The values of a tensor as a read-only view of the mapped file.

        Raises:
            SpecExportError: ``dtype-unsupported`` for a format numpy has not.
        """
        return self._files.read(name)

    def check_unchanged(self) -> list[Finding]:
        """``file-changed`` errors if a weight file is not the one that was opened."""
        return self._files.check_unchanged()

    def _without_wrapped_copies(self) -> dict[str, TensorInfo]:
        """Drop a wrapper's second copy of a tensor; refuse one that differs."""
        tensors = self._files.tensors
        problems = []
        for name in list(tensors):
            clean = unwrapped(name)
            if clean == name or clean not in tensors:
                continue
            if not self._files.same_bytes(name, clean):
                problems.append(
                    error(
                        "file-contradiction",
                        clean,
                        f"{name} and {clean} are the same parameter and hold "
                        "different values",
                        "save the checkpoint from the unwrapped module",
                    )
                )
            del tensors[name]
            self.findings.append(
                info("export-ignored", name, f"a copy of {clean} under a wrapper name")
            )
        if problems:
            raise SpecExportError(problems)
        return tensors


def unwrapped(name: str) -> str:
    """The name of a parameter without what wrapper modules put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix(_DDP)


def read_record(folder: Path, config: dict[str, Any]) -> TrainingRecord:
    """What a checkpoint folder and its run say about the training.

    Nothing here decides what is exported, so a file that is absent or cut off
    leaves its fields empty.

    Args:
        folder: The checkpoint.
        config: Its config.json.
    """
    record = TrainingRecord()
    version = config.get("speculators_version")
    if isinstance(version, str):
        record.speculators_version = version
    state = _json_or_empty(folder / "training_state.json")
    record.global_step = _count(state.get("global_step"))
    record.epoch = _count(state.get("epoch"))
    if record.epoch is None and epoch_number(folder.name) is not None:
        record.epoch = epoch_number(folder.name)
    record.metrics = _json_or_empty(folder / "val_metrics.json")
    record.packages = _package_versions(folder / "train_command.txt")
    places = [folder]
    if epoch_number(folder.name) is not None or folder.name == "interrupted":
        places.append(folder.parent)
    for place in places:
        recipe = _recipe(place / "run.yaml")
        if recipe is not None:
            record.recipe, record.recipe_digest = recipe
            break
    return record


def epoch_number(name: str) -> int | None:
    """The epoch that a folder name of speculators stands for.

    Only what speculators writes itself: ``int("007")`` or ``int("2024_01")``
    would be a stranger's folder.
    """
    if name.isascii() and name.isdecimal() and str(int(name)) == name:
        return int(name)
    return None


def incomplete_because(folder: Path) -> str | None:
    """Why a folder is no complete checkpoint; None if it is one."""
    try:
        CheckpointSource.open(folder)
    except SpecExportError as problem:
        return problem.findings[0].message
    except OSError as problem:
        return f"it cannot be read ({problem.strerror})"
    return None


def looks_like_checkpoint(folder: Path) -> bool:
    """Whether a folder is meant to be a checkpoint, complete or not."""
    return (folder / "config.json").is_file() and has_weights(folder)


def _left_out(folder: Path) -> list[Finding]:
    return [
        info("export-ignored", path.name, "it is beside the weights and not copied")
        for path in sorted(folder.iterdir())
        if path.is_file()
        and path.name not in _KNOWN_FILES
        and not path.name.endswith((".safetensors", ".safetensors.index.json"))
    ]


def _json_or_empty(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _package_versions(path: Path) -> dict[str, str]:
    """Versions from the comment header of speculators' train_command.txt.

    The command below the header holds paths and is not read.
    """
    try:
        lines = read_regular(path).decode().splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    packages = {}
    for line in lines:
        name, separator, version = line.removeprefix("# ").partition(": ")
        if (
            line.startswith("# ")
            and separator
            and name.islower()
            and version != "not installed"
        ):
            packages[name] = version
    return packages


def _recipe(path: Path) -> tuple[dict[str, Any], str] | None:
    import yaml

    try:
        data = read_regular(path)
        recipe = yaml.safe_load(data)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return None
    if not isinstance(recipe, dict) or not _is_small(recipe):
        return None
    return recipe, hashlib.sha256(data).hexdigest()


def _is_small(recipe: Any, most: int = 10_000) -> bool:
    """Whether a recipe has few values: YAML's aliases can write out to billions."""
    left, waiting = most, [recipe]
    while waiting and left:
        left -= 1
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list | tuple | set):
            waiting += value
        if len(waiting) > most:
            return False
    return not waiting
