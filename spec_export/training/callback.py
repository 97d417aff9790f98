"""``SGLangExport``: what an exporter does at each event of a training."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from spec_export.artifact.hidden import this_process
from spec_export.artifact.publish import point_link, retain, settle, step_name
from spec_export.artifact.resolve import resolve_target
from spec_export.artifact.roles import Known
from spec_export.artifact.runs import state_path
from spec_export.artifact.signals import undisturbed
from spec_export.artifact.target import Target
from spec_export.export import (
    ExportOptions,
    ExportResult,
    Judge,
    plan_source,
)
from spec_export.findings import Finding, Severity, SpecExportError, error, has_errors
from spec_export.training.background import Worker
from spec_export.training.buffer import HostBuffer
from spec_export.training.compare import (
    Cast,
    empty_draft,
    is_sharded,
    live_cast,
    live_judge,
)
from spec_export.training.hook import INTERRUPTIONS, TrainingEvent
from spec_export.training.problems import Note, Problems, as_findings, as_state
from spec_export.training.ranks import agreed, on_rank0, settled, shared
from spec_export.training.recipe import (
    EverySteps,
    as_in_recipe,
    check_output_dir,
    named_as_in_recipe,
    parse_init_args,
)
from spec_export.training.snapshot import (
    RunMemory,
    Snapshot,
    make_record,
    saved_values,
    take_snapshot,
    training_id,
)
from spec_export.training.write import write_export

logger = logging.getLogger(__name__)

# Saves of the trainer that `every: checkpoint` follows.
_SAVES = frozenset({"epoch", "mid-epoch", "best", "interrupted"})
# Far below the timeout of a process group (10 minutes for NCCL): other ranks wait.
FLUSH_SECONDS = 300.0
# speculators ends the process 120 s after a signal, its own save included; what is
# left is for the snapshot.
INTERRUPTED_SECONDS = 90.0
KEPT_RESULTS = 16


@dataclass
class _Run:
    """What the exporter knows once training has started.

    ``folders``, ``known``, ``memory.exported`` and ``memory.best`` are the worker's;
    what was trained beyond ``first_step`` is exported at the end.
    """

    memory: RunMemory | None
    target: Target | None
    first_step: int
    state_file: Path
    skeleton: nn.Module | None = None
    exported_step: int | None = None  # or tried to
    handed_over: int | None = None  # the last step that the worker was given
    cast_seconds: float | None = None
    best_step: int = -1
    best_loss: float = math.inf
    folders: dict[int, Path] = field(default_factory=dict)
    buffer: HostBuffer = field(default_factory=HostBuffer)
    known: Known = field(default_factory=Known)
    deadline: float | None = None  # of an interrupted training


class SGLangExport:
    """Exports the draft while it trains.

    A snapshot of the weights is taken in the training's own thread; hashing, checking,
    writing and comparing with it happen in another one.

    Attributes:
        config: The validated arguments.
        results: The newest exports of rank 0; a training may make thousands.
        findings: What the plan said before the first step.
        recipe: What the trainer was asked for, for the manifest, in the form of
            speculators' ``run.yaml``; ``launch`` sets it.
        recipe_digest: SHA-256 of that file's bytes; ``launch`` sets it.
    """

    def __init__(self, **init_args: Any) -> None:
        self.config = parse_init_args(init_args)
        self.results: deque[ExportResult] = deque(maxlen=KEPT_RESULTS)
        self.findings: list[Finding] = []
        self.recipe: dict[str, Any] | None = None
        self.recipe_digest: str | None = None
        self._run: _Run | None = None
        self._worker = Worker()
        self._problems = Problems()
        self._state = threading.Lock()  # both threads write the state file
        self._begun: Note | None = None  # failed, if this process is killed now
        self._given_up = False

    @property
    def errors(self) -> list[Exception]:
        """What went wrong last."""
        return list(self._problems.newest)

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
        run = self._run
        assert run is not None
        if event.reason == "best":
            # After a NaN the trainer takes any loss for the best.
            loss = (event.metrics or {}).get("loss_epoch", math.nan)
            if math.isfinite(loss) and loss < run.best_loss:
                run.best_step, run.best_loss = event.global_step, loss
        if event.reason == "interrupted":
            began = time.monotonic() if event.began is None else event.began
            run.deadline = began + INTERRUPTED_SECONDS
        due = self._is_due(event)
        if event.reason == "interrupted":
            # A signal finds each rank at another place; rank 0 knows what it has done.
            due = shared(due)
        if due:
            self._export(event)
        if event.reason == "best" and run.memory is not None:
            with undisturbed():
                self._worker.submit(lambda: self._guarded(event, self._link_best))
        if event.reason == "interrupted" or (
            event.reason == "end" and not event.interrupted
        ):
            self._attempt(event, lambda: on_rank0(self._flush))

    def close(self) -> None:
        """Let an export finish that a training left unfinished when it failed."""
        if not self._given_up and not self._worker.wait(FLUSH_SECONDS):
            logger.error("[spec-export] an export was not finished in time")

    def _start(self, event: TrainingEvent) -> None:
        # One recipe on all ranks: with two, one would wait for the other for ever.
        self.config = shared(self.config)
        checkpoints = Path(event.trainer.checkpointer.path)
        check_output_dir(self.config.output_dir, checkpoints)
        values = saved_values(event.trainer.model)
        self._run = on_rank0(lambda: self._plan(event, values))
        if self._run is None:  # another rank plans; this one only takes part
            self._run = _Run(None, None, event.global_step, self.config.output_dir)
        run = self._run
        known = (run.first_step, run.best_step, run.best_loss)
        run.first_step, run.best_step, run.best_loss = shared(known)

    def _plan(self, event: TrainingEvent, values: dict[str, Any]) -> _Run:
        """Refuse a draft that cannot be served, before anything is trained."""
        state_file = state_path(self.config.output_dir, training_id(event.trainer))
        memory = RunMemory.begin(event.trainer, values, state_file)
        record = make_record(event, memory, values, self.recipe, self.recipe_digest)
        snapshot = take_snapshot(event, values, record, self.config.dtype)
        name = _target_name(snapshot.config)
        target, findings = resolve_target(name, None)
        with named_as_in_recipe("init_args"):
            plan = plan_source(snapshot, target, self._options())
        self.findings = as_in_recipe([*findings, *plan.findings], "init_args")
        if has_errors(self.findings):
            raise SpecExportError(self.findings)
        for one in self.findings:
            if one.severity is Severity.WARNING:
                logger.warning("[spec-export] %s: %s", one.subject, one.message)
        if memory.exported is None:
            memory.exported = event.global_step
        memory.save(state_file)
        run = _Run(memory, target, event.global_step, state_file)
        # An earlier process may have ended before its last export did.
        run.first_step = min(run.first_step, memory.exported)
        run.best_step = self._problems.take_over(memory.failed, event.global_step)
        run.best_loss = memory.best_loss
        if self.config.compare.on == "checkpoint":
            run.skeleton = empty_draft(snapshot.config)
        return run

    def _is_due(self, event: TrainingEvent) -> bool:
        assert self._run is not None
        if self._run.exported_step == event.global_step:
            return False  # these weights are exported already
        every = self.config.every
        if event.reason == "end":
            trained = event.global_step > self._run.first_step
            return trained and every != "best" and not event.interrupted
        is_best = self._run.best_step == event.global_step
        if every == "best":
            return event.reason == "best" and is_best
        if isinstance(every, EverySteps):
            if event.reason == "step":
                return event.global_step % every.steps == 0
            # The best ones too, or `best` would name older weights.
            return event.reason == "interrupted" or (event.reason == "best" and is_best)
        return event.reason in _SAVES

    def _export(self, event: TrainingEvent) -> None:
        """Snapshot on all ranks, write on rank 0, agree on the outcome."""
        run = self._run
        assert run is not None
        run.exported_step = event.global_step
        try:
            self._attempt(event, lambda: self._begin(event))
        except INTERRUPTIONS:
            if run.handed_over != event.global_step:
                run.exported_step = None  # the interrupted save exports it
            raise

    def _begin(self, event: TrainingEvent) -> None:
        run = self._run
        assert run is not None
        if not agreed(lambda: self._has_room(event)):
            run.exported_step = None
            return
        values = saved_values(event.trainer.model, event.gathered)
        cast = self._cast(event)
        on_rank0(lambda: self._hand_over(event, values, cast))

    def _cast(self, event: TrainingEvent) -> Callable[[], Cast] | None:
        """How rank 0 gets leg *cast*; None: nothing is to be compared."""
        if self.config.compare.on != "checkpoint" or event.reason == "interrupted":
            return None
        run, model = self._run, event.trainer.model
        assert run is not None
        most = self.config.compare.max_seconds
        # No look at the clock where the last one was fast: rows cost what they cost.
        fast = run.cast_seconds is not None and 2 * run.cast_seconds <= most
        limit = None if fast else most
        if not is_sharded(model):
            return lambda: live_cast(model, self.config, event.batch, limit)
        # A forward of a sharded model is a collective: no rank may be left alone in it,
        # so all take the same rows.
        batch, limit = shared((event.batch, limit))
        return settled(lambda: live_cast(model, self.config, batch, limit))

    def _has_room(self, event: TrainingEvent) -> bool:
        """Whether the export can begin; at most one is being written.

        Raises:
            Exception: That of an earlier export under ``on_error: raise``.
        """
        run = self._run
        assert run is not None
        self._raise_earlier()
        if not self._worker.busy:
            return True
        last = event.reason in ("interrupted", "end")
        policy = self.config.when_busy or ("skip" if event.reason == "step" else "wait")
        if policy == "skip" and not last:
            why = "it was skipped: the one before it was still being written"
            skipped = error("export-error", step_name(event.global_step), why)
            self._problems.note(event.global_step, skipped.message)
            with undisturbed():  # logging would keep what a signal raises to itself
                logger.warning("[spec-export] step %d: %s", event.global_step, why)
            return False
        if not self._worker.wait(self._seconds()):
            raise self._late()
        self._raise_earlier()
        return True

    def _seconds(self) -> float:
        """How long the training may be held up by a wait."""
        assert self._run is not None
        if self._run.deadline is None:
            return FLUSH_SECONDS
        return max(0.0, self._run.deadline - time.monotonic())

    def _hand_over(
        self,
        event: TrainingEvent,
        values: dict[str, Any],
        cast: Callable[[], Cast] | None,
    ) -> None:
        """The part of an export that holds the training up."""
        run = self._run
        assert run is not None and run.memory is not None
        record = make_record(event, run.memory, values, self.recipe, self.recipe_digest)
        snapshot = take_snapshot(event, values, record, self.config.dtype, run.buffer)
        judge = None
        if cast is not None:
            found = cast()
            run.cast_seconds = found.leg.seconds if found.leg.ran else None
            judge = live_judge(
                found,
                run.skeleton,
                snapshot,
                run.target,
                self.config,
                lambda: run.deadline is not None,
            )

        def write() -> None:
            self._guarded(event, lambda: self._write(event, snapshot, judge))

        with undisturbed():
            self._worker.submit(write)
            run.handed_over, self._given_up = event.global_step, False
        if not self.config.background and event.reason != "interrupted":
            self._worker.wait()
            self._raise_earlier()

    def _flush(self) -> None:
        """Wait for what is being written, within bounds."""
        if not self._worker.wait(self._seconds()):
            raise self._late()
        self._remember()
        self._raise_earlier()

    def _late(self) -> SpecExportError:
        self._given_up = True
        why = "an export was still being written when the time for it was up"
        hint = "what it left is swept by the next export; finalize the checkpoint"
        return SpecExportError([error("export-error", "export", why, hint)])

    def _raise_earlier(self) -> None:
        problem = self._problems.unraised()
        if problem is not None and self.config.on_error == "raise":
            raise problem

    def _attempt(self, event: TrainingEvent, act: Callable[[], object]) -> None:
        """Do something whose failure ends the training only if that was asked for."""
        try:
            act()
        except INTERRUPTIONS:
            raise
        except Exception as problem:
            if self._problems.add(problem):
                self._failed(event, problem)
            if self.config.on_error == "raise":
                raise

    def _guarded(self, event: TrainingEvent, act: Callable[[], object]) -> None:
        """The same in the worker: the training learns of it at its next export."""
        try:
            act()
        except Exception as problem:
            self._begun = None
            self._problems.add(problem, unraised=True)
            self._failed(event, problem)

    def _failed(self, event: TrainingEvent, problem: Exception) -> None:
        """Say it in the log, for the next manifest and for ``finalize``."""
        self._problems.note(event.global_step, f"{type(problem).__name__}: {problem}")
        with undisturbed():
            logger.error(
                "[spec-export] the export of step %d failed and training goes on: %s",
                event.global_step,
                problem,
                exc_info=not isinstance(problem, SpecExportError),
            )
        self._remember()

    def _remember(self) -> None:
        """Keep in the state file what failed and was not made good, and the best.

        A full disk has no room for that either: it is tried again.
        """
        run = self._run
        if run is None or run.memory is None:
            return
        # Looked at under the lock, or the slower thread would write what is past.
        with self._state, contextlib.suppress(SpecExportError, OSError):
            notes, begun = self._problems.open(run.best_step), self._begun
            notes += [begun] if begun is not None else []
            run.memory.failed = as_state(notes, run.best_step)
            run.memory.best_loss = run.best_loss
            run.memory.save(run.state_file)

    def _best(self, run: _Run, memory: RunMemory) -> Path | None:
        """The export of the best weights, else of the best that were exported."""
        if (folder := run.folders.get(run.best_step)) is not None:
            memory.best = folder.name
        folder = self.config.output_dir / (memory.best or "")
        return folder if memory.best and folder.is_dir() else None

    def _write(
        self, event: TrainingEvent, snapshot: Snapshot, judge: Judge | None
    ) -> None:
        """Everything that need not hold the training up."""
        run = self._run
        assert run is not None and run.memory is not None
        output_dir, step = self.config.output_dir, event.global_step
        why = "the process ended before it was written"
        self._begun = Note(step, why, this_process())
        self._remember()
        run.known.start(snapshot.versions)
        told = [n for n in self._problems.open(run.best_step) if n.step != step]
        result = write_export(
            snapshot,
            run.target,
            self._options(),
            output_dir / step_name(step),
            judge,
            as_findings(told),
            run.known,
        )
        self.results.append(result)
        if result.status == "failed":
            raise SpecExportError(result.findings)
        run.folders[step] = result.folder
        settle(
            output_dir,
            result.folder,
            best=self._best(run, run.memory),
            keep_last=self.config.keep_last,
            run_id=run.memory.run_id,
        )
        self._begun = None
        self._problems.made_good(told, step)
        run.memory.exported = step
        self._remember()
        leg = result.manifest.comparison.get("layout")
        verdict = "not run" if leg is None else leg.verdict
        logger.info(
            "[spec-export] exported %s, comparison: %s", result.folder.name, verdict
        )

    def _link_best(self) -> None:
        """Let ``best`` name the export of the best weights, once there is one."""
        run, output_dir = self._run, self.config.output_dir
        assert run is not None and run.memory is not None
        if (folder := self._best(run, run.memory)) is not None:
            point_link(output_dir / "best", folder.name)
            retain(output_dir, self.config.keep_last, run.memory.run_id, folder)
        self._remember()  # what failed may be the best now, or not

    def _options(self) -> ExportOptions:
        return ExportOptions(
            sglang=self.config.sglang,
            plugin=self.config.plugin,
            allow=self.config.allow,
            dtype=self.config.dtype,
            max_shard_size=self.config.max_shard_size,
        )


def _target_name(config: dict[str, Any]) -> str | None:
    return config.get("speculators_config", {}).get("verifier", {}).get("name_or_path")
