"""``SGLangExport``: what an exporter does at each event of a training."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from spec_export.artifact.publish import point_link, retain, step_name
from spec_export.artifact.resolve import resolve_target
from spec_export.artifact.target import Target
from spec_export.export import (
    ExportOptions,
    ExportResult,
    Judge,
    export_source,
    plan_source,
)
from spec_export.findings import Finding, Severity, SpecExportError, has_errors
from spec_export.training.compare import live_judge
from spec_export.training.hook import (
    INTERRUPTIONS,
    TrainingCallback,
    TrainingEvent,
    fan_out,
    hook_trainer,
)
from spec_export.training.recipe import EverySteps, check_output_dir, parse_init_args
from spec_export.training.snapshot import (
    STATE_FILE,
    RunMemory,
    Snapshot,
    make_record,
    saved_values,
    take_snapshot,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")

# Saves of the trainer that `every: checkpoint` follows.
_SAVES = frozenset({"epoch", "mid-epoch", "best", "interrupted"})


@dataclass
class _Run:
    """What the exporter knows once training has started."""

    memory: RunMemory | None
    target: Target | None
    first_step: int
    exported_step: int | None = None
    best_step: int = -1  # NaN is never the best
    folders: dict[int, Path] = field(default_factory=dict)


class SGLangExport:
    """Exports the draft while it trains; arguments as in design.md 3.

    Attributes:
        config: The validated arguments.
        results: The exports so far, of rank 0.
        errors: What went wrong while training went on (``on_error: warn``).
        findings: What the plan said before the first step.
        recipe: What the trainer was asked for, for the manifest, in the form of
            speculators' ``run.yaml``; ``launch`` sets it.
        recipe_digest: SHA-256 of that file's bytes; ``launch`` sets it.
    """

    def __init__(self, **init_args: Any) -> None:
        self.config = parse_init_args(init_args)
        self.results: list[ExportResult] = []
        self.errors: list[Exception] = []
        self.findings: list[Finding] = []
        self.recipe: dict[str, Any] | None = None
        self.recipe_digest: str | None = None
        self._run: _Run | None = None

    def on_event(self, event: TrainingEvent) -> None:
        """Plan before the first step, then export when it is time.

        Called on every rank; rank 0 writes.

        Raises:
            SpecExportError: Before the first step, if the draft cannot be served
                or the arguments make no sense; later only under
                ``on_error: raise``.
        """
        if event.reason == "start":
            self._start(event)
            return
        if event.reason == "best" and _is_finite(event):
            assert self._run is not None
            self._run.best_step = event.global_step
        if self._is_due(event):
            self._export(event)
        self._attempt(event, self._link_best)

    def _start(self, event: TrainingEvent) -> None:
        check_output_dir(self.config.output_dir, Path(event.trainer.checkpointer.path))
        values = saved_values(event.trainer.model)
        self._run = on_rank0(lambda: self._plan(event, values))
        if self._run is None:  # another rank plans; this one only takes part
            self._run = _Run(None, None, event.global_step)

    def _plan(self, event: TrainingEvent, values: dict[str, Any]) -> _Run:
        """Refuse a draft that cannot be served, before anything is trained."""
        state_file = self.config.output_dir / STATE_FILE
        memory = RunMemory.begin(event.trainer, values, state_file)
        snapshot = self._snapshot(event, values, memory)
        name = _target_name(snapshot.config)
        target, findings = resolve_target(name, None)
        plan = plan_source(snapshot, target, self._options())
        self.findings = [*findings, *plan.findings]
        if has_errors(self.findings):
            raise SpecExportError(self.findings)
        for one in self.findings:
            if one.severity is Severity.WARNING:
                logger.warning("[spec-export] %s: %s", one.subject, one.message)
        memory.save(state_file, event.trainer)
        return _Run(memory, target, event.global_step)

    def _is_due(self, event: TrainingEvent) -> bool:
        assert self._run is not None
        if self._run.exported_step == event.global_step:
            return False  # these weights are exported already
        every = self.config.every
        if event.reason == "end":
            trained = event.global_step > self._run.first_step
            return trained and every != "best" and not event.interrupted
        if every == "best":
            return event.reason == "best" and _is_finite(event)
        if isinstance(every, EverySteps):
            if event.reason == "step":
                return event.global_step % every.steps == 0
            return event.reason == "interrupted"
        return event.reason in _SAVES

    def _export(self, event: TrainingEvent) -> None:
        """Snapshot on all ranks, write on rank 0, agree on the outcome."""
        assert self._run is not None
        self._run.exported_step = event.global_step
        values = saved_values(event.trainer.model)
        try:
            self._attempt(event, lambda: on_rank0(lambda: self._write(event, values)))
        except INTERRUPTIONS:
            self._run.exported_step = None  # the interrupted save exports it
            raise

    def _attempt(self, event: TrainingEvent, act: Callable[[], object]) -> None:
        """Do something whose failure ends the training only if that was asked for."""
        try:
            act()
        except INTERRUPTIONS:
            raise
        except Exception as problem:
            self.errors.append(problem)
            if self.config.on_error == "raise":
                raise
            logger.error(
                "[spec-export] the export of step %d failed and training goes on: %s",
                event.global_step,
                problem,
                exc_info=not isinstance(problem, SpecExportError),
            )

    def _write(self, event: TrainingEvent, values: dict[str, Any]) -> None:
        run = self._run
        assert run is not None and run.memory is not None
        known = len(run.memory.moved)
        snapshot = self._snapshot(event, values, run.memory)
        if len(run.memory.moved) > known:
            run.memory.save(self.config.output_dir / STATE_FILE, event.trainer)
        result = write_export(
            snapshot,
            run.target,
            self._options(),
            self.config.output_dir / step_name(event.global_step),
            self._judge(event, snapshot, run.target),
        )
        self.results.append(result)
        if result.status == "failed":
            raise SpecExportError(result.findings)
        run.folders[event.global_step] = result.folder
        point_link(self.config.output_dir / "latest", result.folder.name)
        retain(self.config.output_dir, self.config.keep_last, run.memory.run_id)
        logger.info("[spec-export] exported step %d", event.global_step)

    def _snapshot(
        self, event: TrainingEvent, values: dict[str, Any], memory: RunMemory
    ) -> Snapshot:
        record = make_record(event, memory, values, self.recipe, self.recipe_digest)
        return take_snapshot(event, values, record, self.config.dtype)

    def _judge(
        self, event: TrainingEvent, snapshot: Snapshot, target: Target | None
    ) -> Judge | None:
        if self.config.compare.on != "checkpoint":
            return None
        return live_judge(event.trainer.model, snapshot, target, self.config)

    def _link_best(self) -> None:
        """Let ``best`` name the export of the best weights, once there is one."""
        assert self._run is not None
        folder = self._run.folders.get(self._run.best_step)
        if folder is not None:
            point_link(self.config.output_dir / "best", folder.name)

    def _options(self) -> ExportOptions:
        return ExportOptions(
            sglang=self.config.sglang,
            plugin=self.config.plugin,
            allow=self.config.allow,
            dtype=self.config.dtype,
            max_shard_size=self.config.max_shard_size,
        )


def write_export(
    snapshot: Snapshot,
    target: Target | None,
    options: ExportOptions,
    destination: Path,
    judge: Judge | None,
) -> ExportResult:
    """Write a snapshot through the pipeline that ``finalize`` uses too.

    Args:
        snapshot: The draft.
        target: Its target, if its configuration is at hand.
        options: The user's choices.
        destination: ``<output_dir>/step-<8 digits>``.
        judge: Compares what was written with the live module.
    """
    return export_source(
        snapshot, target, options, destination, judge=judge, place="step"
    )


@contextlib.contextmanager
def attach(trainer: Any, *callbacks: TrainingCallback) -> Iterator[Any]:
    """Let callbacks see what a trainer does.

    ``with attach(trainer, SGLangExport(output_dir=...)): trainer.run_training()``

    Args:
        trainer: A ``speculators.train.trainer.Trainer``.
        callbacks: Called in order, on every rank.

    Yields:
        The trainer.

    Raises:
        SpecExportError: exit 2 if this release of speculators cannot be hooked.
    """
    handle = hook_trainer(trainer, fan_out(callbacks))
    try:
        yield trainer
    finally:
        handle.remove()


def on_rank0(act: Callable[[], T]) -> T | None:
    """Run something on rank 0 and let every rank learn if it failed.

    Without this an error on rank 0 would leave the others in a barrier.

    Returns:
        What ``act`` returned on rank 0; None on the others.

    Raises:
        Exception: That of rank 0; on the others a copy of it.
    """
    if not (
        dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    ):
        return act()
    result: T | None = None
    problem: Exception | None = None
    if dist.get_rank() == 0:
        try:
            result = act()
        except INTERRUPTIONS:
            raise
        except Exception as caught:
            problem = caught
    told = [_portable(problem)]
    dist.broadcast_object_list(told, src=0)
    if problem is not None:
        raise problem
    if told[0] is not None:
        findings, exit_code, text = told[0]
        raise (SpecExportError(findings, exit_code) if findings else RuntimeError(text))
    return result


def _portable(problem: Exception | None) -> tuple[list[Finding], int, str] | None:
    """An error as plain data: not every exception survives pickling."""
    if problem is None:
        return None
    if isinstance(problem, SpecExportError):
        return problem.findings, problem.exit_code, str(problem)
    return [], 1, f"rank 0: {type(problem).__name__}: {problem}"


def _is_finite(event: TrainingEvent) -> bool:
    return math.isfinite((event.metrics or {}).get("loss_epoch", math.nan))


def _target_name(config: dict[str, Any]) -> str | None:
    return config.get("speculators_config", {}).get("verifier", {}).get("name_or_path")
