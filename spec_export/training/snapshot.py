"""The live draft of a training as a source, and what its run has to remember."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from spec_export.artifact.disk import replace_file
from spec_export.artifact.source import TrainingRecord, unwrapped
from spec_export.layout.tensors import TensorInfo
from spec_export.training.buffer import HostBuffer
from spec_export.training.draft_config import checkpoint_config
from spec_export.training.hook import TrainingEvent

PACKAGES = ("spec-export", "speculators", "torch", "transformers", "safetensors")
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
# What speculators' checkpointer rounds to, whatever the live module has.
CHECKPOINT_DTYPE = torch.bfloat16
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class Snapshot:
    """A ``Source`` whose tensors are those of the live module.

    Values are rounded when they are read. Of live tensors it holds until the next
    optimizer step, of copies (``HostBuffer``) until the next ones are made.

    Attributes:
        config, tensors, record, label: As in ``artifact.source.Source``; dtypes
            are those after rounding.
        versions: For each copy a number that is the same as in the last snapshot
            if its bytes are.
    """

    def __init__(
        self,
        values: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        config: dict[str, Any],
        record: TrainingRecord,
        versions: Mapping[str, int] | None = None,
    ) -> None:
        self.config = config
        self.versions = dict(versions or {})
        self.record = record
        self.label = f"training at step {record.global_step}"
        self._values = values
        self._dtype = dtype
        self.tensors = {
            name: TensorInfo(name, _NAMES[self._saved_as(value)], tuple(value.shape))
            for name, value in values.items()
        }

    def read(self, name: str) -> np.ndarray:
        """The values of a tensor in the saved dtype, C contiguous."""
        return as_numpy(self.rounded(name))

    def rounded(self, name: str) -> torch.Tensor:
        """The tensor in the saved dtype, where the live one lies."""
        value = self._values[name]
        return value.to(self._saved_as(value))

    def _saved_as(self, value: torch.Tensor) -> torch.dtype:
        return self._dtype if value.is_floating_point() else value.dtype


def as_numpy(value: torch.Tensor) -> np.ndarray:
    """A tensor as a numpy array, without a copy if it lies on the CPU already."""
    value = value.detach().cpu().contiguous()
    if value.dtype == torch.bfloat16:
        return value.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return value.numpy()


def raw_module(model: Any) -> Any:
    """The draft inside what DistributedDataParallel put around it."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def saved_values(
    model: Any, gathered: Mapping[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """The tensors that speculators writes to a checkpoint, by its names.

    A collective for a sharded model: every rank has to call it, and only rank 0
    gets the tensors.

    Args:
        model: The trainer's.
        gathered: What the trainer gathered for a save of the same weights, which
            makes a second collective unnecessary.
    """
    module = raw_module(model)
    if gathered is not None:
        state: Any = gathered
    elif isinstance(module, FSDPModule):
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(model, options=options)
    else:
        state = module.state_dict()
    left_out = set(module._keys_to_ignore_on_save or ())
    return {
        name: value.detach()
        for key, value in state.items()
        if (name := unwrapped(key)) not in left_out
    }


@dataclass
class RunMemory:
    """What a run has to remember from its first step, also over a resume.

    Attributes:
        run_id: Identifies the run.
        training: Identifies the training, over its resumes.
        first: SHA-256 of each tensor at the first step, rounded as a checkpoint
            rounds it: the only form that survives a resume.
        moved: Tensors that were seen to differ from the first step.
        complete: Whether the first step of the run was seen at all.
        failed: ``step``, ``message`` and ``best`` of each export that failed and
            that no later one has made good, and of that which the process ``by`` is
            writing.
        exported: The step of the newest export, at first the one it began with.
        best: The export of the best weights that were exported, by its folder's name.
        best_loss: The lowest validation loss; infinite before there is one.
    """

    run_id: str
    training: str
    first: dict[str, str] = field(default_factory=dict)
    moved: set[str] = field(default_factory=set)
    complete: bool = True
    failed: list[dict[str, Any]] = field(default_factory=list)
    exported: int | None = None
    best: str | None = None
    best_loss: float = math.inf
    _live: dict[str, str] = field(default_factory=dict)
    _versions: dict[str, int] = field(default_factory=dict)
    _saved: bytes = b""

    @classmethod
    def begin(
        cls, trainer: Any, values: Mapping[str, torch.Tensor], file: Path
    ) -> RunMemory:
        """Look at the tensors before the first step; ``save`` is up to the caller.

        Args:
            trainer: The trainer, after it has loaded what it resumes from.
            values: ``saved_values`` of its model.
            file: The state file, one for each training; read if the trainer resumes
                this very run.
        """
        resumes = bool(
            trainer.resume_from_checkpoint and trainer.checkpointer.previous_epoch != -1
        )
        training = training_id(trainer)
        memory = cls._reload(file, training) if resumes else None
        rounded = {n: digest(_rounded(value)) for n, value in values.items()}
        if memory is None:
            memory = cls(uuid.uuid4().hex, training, rounded, complete=not resumes)
        else:
            memory.moved |= {n for n, d in rounded.items() if memory.first.get(n) != d}
        parameters = live_parameters(trainer.model)
        memory._versions = {n: p._version for n, p in parameters.items()}
        memory._live = {
            n: digest(value)
            for n, value in values.items()
            if n not in memory.moved and (p := parameters.get(n)) is not None
            if p.requires_grad
        }
        return memory

    @classmethod
    def _reload(cls, file: Path, training: str) -> RunMemory | None:
        try:
            state = json.loads(file.read_bytes())
            if state["training"] != training:
                return None
            exported, best = state.get("exported"), state.get("best")
            loss = state.get("best_loss")
            return cls(
                str(state["run_id"]),
                training,
                dict(state["first"]),
                set(state["moved"]),
                bool(state["complete"]),
                [
                    {"step": int(f["step"]), "message": str(f["message"])}
                    | {"best": bool(f["best"])}
                    for f in state["failed"]
                ],
                None if exported is None else int(exported),
                None if best is None else Path(str(best)).name,
                math.inf if loss is None else float(loss),
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None  # as if this run had been started without us

    def save(self, file: Path) -> None:
        """Write the state file, in one step, unless it says the same already."""
        state = {
            "training": self.training,
            "run_id": self.run_id,
            "complete": self.complete,
            "first": self.first,
            "moved": sorted(self.moved),
            "failed": self.failed,
            "exported": self.exported,
            "best": self.best,
            "best_loss": self.best_loss if math.isfinite(self.best_loss) else None,
        }
        data = json.dumps(state, indent=1).encode()
        if data != self._saved:
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(file, data)
            self._saved = data

    def look(self, trainer: Any, values: Mapping[str, torch.Tensor]) -> dict[str, bool]:
        """Which tensors have moved since the first step.

        A tensor that has moved once is not looked at again; of a frozen one
        only torch's count of in-place changes, unless that has grown.

        Returns:
            By name; a tensor of which nothing is known is left out.
        """
        parameters = live_parameters(trainer.model)
        for name, value in values.items():
            if name not in self.moved and self._has_moved(
                name, value, parameters.get(name)
            ):
                self.moved.add(name)
        return {
            name: name in self.moved
            for name in values
            if name in self.moved or (self.complete and name in self.first)
        }

    def _has_moved(self, name: str, value: torch.Tensor, parameter: Any) -> bool:
        if name in self._live:
            return digest(value) != self._live[name]
        if parameter is not None and parameter._version == self._versions.get(name):
            return False
        return digest(_rounded(value)) != self.first.get(name)


def live_parameters(model: Any) -> dict[str, torch.nn.Parameter]:
    """The parameters of a model by the names of a checkpoint."""
    return {unwrapped(n): p for n, p in raw_module(model).named_parameters()}


def digest(value: torch.Tensor) -> str:
    """SHA-256 of the raw bytes of a tensor in its own dtype."""
    return hashlib.sha256(as_numpy(value).reshape(-1).view(np.uint8).data).hexdigest()


def _rounded(value: torch.Tensor) -> torch.Tensor:
    return value.to(CHECKPOINT_DTYPE) if value.is_floating_point() else value


def training_id(trainer: Any) -> str:
    """Tells two trainings apart that write to one output_dir; holds no path."""
    return hashlib.sha256(
        str(Path(trainer.checkpointer.path).resolve()).encode()
    ).hexdigest()


def make_record(
    event: TrainingEvent,
    memory: RunMemory,
    values: Mapping[str, torch.Tensor],
    recipe: dict[str, Any] | None = None,
    recipe_digest: str | None = None,
) -> TrainingRecord:
    """What is known about the training at an event.

    Args:
        event: The event.
        memory: What the run remembers; tensors that have moved are noted in it.
        values: ``saved_values`` of the model.
        recipe: As read.
        recipe_digest: SHA-256 of the recipe file's bytes.
    """
    trainer = event.trainer
    parameters = live_parameters(trainer.model)
    optimized = {
        id(parameter)
        for optimizer in trainer.optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    named = {name: parameters[name] for name in values if name in parameters}
    packages = installed(PACKAGES)
    return TrainingRecord(
        run_id=memory.run_id,
        speculators_version=packages.get("speculators"),
        global_step=event.global_step,
        epoch=event.epoch,
        metrics=finite(event.metrics or {}),
        recipe=recipe,
        recipe_digest=recipe_digest,
        packages=dict(packages),
        requires_grad={n: p.requires_grad for n, p in named.items()},
        in_optimizer={n: id(p) in optimized for n, p in named.items()},
        # Of a run that began without us and has not moved yet nothing is known.
        changed=memory.look(trainer, values) or None,
    )


def take_snapshot(
    event: TrainingEvent,
    values: Mapping[str, torch.Tensor],
    record: TrainingRecord,
    dtype: str | None = None,
    buffer: HostBuffer | None = None,
) -> Snapshot:
    """Put the live draft together as a source.

    Args:
        event: The event; its trainer's model is left as it is.
        values: ``saved_values`` of the model.
        record: ``make_record`` of the same event.
        dtype: Float format to round to; None is bfloat16.
        buffer: Where to copy the tensors, so that training may go on; None leaves
            them where they are.
    """
    name = dtype or "bfloat16"
    model = event.trainer.model
    config = checkpoint_config(raw_module(model).config, name)
    if buffer is None:
        return Snapshot(values, DTYPES[name], config, record)
    copies, versions = buffer.fill(values, DTYPES[name], live_parameters(model))
    return Snapshot(copies, DTYPES[name], config, record, versions)


@functools.cache
def installed(names: tuple[str, ...]) -> dict[str, str]:
    """Versions of those packages that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def finite(metrics: Mapping[str, float]) -> dict[str, Any]:
    """Metrics as JSON can hold them: what is no finite number becomes null."""
    return {n: v if math.isfinite(v) else None for n, v in metrics.items()}
