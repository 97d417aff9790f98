"""``spec-export train``: speculators' own training with callbacks.

Every flag is speculators' own. Between its parser and its trainer nothing happens
but: the callbacks of the recipe are validated, what it will train is planned, and
the trainer that speculators makes gets the callbacks.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import yaml
from speculators.train import cli as speculators_cli
from speculators.train.config import TrainConfig

from spec_export.check import check_recipe
from spec_export.findings import (
    Finding,
    SpecExportError,
    has_errors,
    usage_error,
)
from spec_export.training.attach import close_all
from spec_export.training.callback import SGLangExport
from spec_export.training.cpu import adapt_flags, cpu_runtime, has_accelerator
from spec_export.training.hook import TrainingCallback, fan_out, hook_trainer
from spec_export.training.launchers import join_launcher
from spec_export.training.recipe import (
    CallbackEntry,
    Recipe,
    config_path,
    read_recipe,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Train.

    Args:
        argv: The arguments of ``speculators train``; None is the command line.

    Returns:
        The exit code: 0, or that of a recipe that cannot be trained or served.

    Raises:
        SystemExit: speculators' own, for flags that it refuses.
        Exception: What speculators raises in training.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        _train(arguments)
    except SpecExportError as problem:
        _tell(problem.findings)
        return problem.exit_code
    return 0


def _train(argv: list[str]) -> None:
    path = config_path(argv)
    recipe = read_recipe(path) if path is not None else None
    config = TrainConfig.resolve(argv)
    _tell(join_launcher(os.environ, config.trainer.fsdp_shard))
    callbacks = make_callbacks(recipe, config.dump_yaml())
    if not callbacks:
        _say("spec-export: the recipe has no callbacks, so nothing will be exported")
    _require_servable(argv, recipe)
    with contextlib.ExitStack() as stack:
        trainer_class = speculators_cli.Trainer
        if not has_accelerator():
            adapted = adapt_flags(config)
            _say(_adapted_line(adapted))
            trainer_class = stack.enter_context(cpu_runtime())
        stack.enter_context(trainer_with(callbacks, trainer_class))
        speculators_cli.main(config)


def make_callbacks(recipe: Recipe | None, run_yaml: str) -> list[TrainingCallback]:
    """Make the callbacks of a recipe, in its order.

    Args:
        recipe: The recipe; None makes none.
        run_yaml: Recipe and flags as speculators writes them to ``run.yaml``.

    Raises:
        SpecExportError: exit 2 ``callback-argument`` if somebody else's callback
            does not take its arguments.
    """
    entries = recipe.callbacks if recipe is not None else ()
    return [_make_callback(entry, run_yaml) for entry in entries]


def _make_callback(entry: CallbackEntry, run_yaml: str) -> TrainingCallback:
    if entry.entry_point is None:
        exporter = SGLangExport(**entry.init_args)
        exporter.recipe = yaml.safe_load(run_yaml)
        exporter.recipe_digest = hashlib.sha256(run_yaml.encode()).hexdigest()
        return exporter
    try:
        callback: TrainingCallback = entry.entry_point.load()(**entry.init_args)
    except (TypeError, ValueError) as problem:
        raise usage_error(
            "callback-argument", entry.class_path, str(problem)
        ) from problem
    if not callable(getattr(callback, "on_event", None)):
        raise usage_error(
            "callback-unknown", entry.class_path, "it has no method on_event"
        )
    return callback


def _require_servable(argv: list[str], recipe: Recipe | None) -> None:
    """Stop before a model is built if its exports could not be served."""
    for exporter in recipe.exporters if recipe is not None else ():
        result = check_recipe(argv, exporter)
        if has_errors(result.findings):
            raise SpecExportError(result.findings)


@contextlib.contextmanager
def trainer_with(
    callbacks: Sequence[TrainingCallback], trainer_class: type
) -> Iterator[None]:
    """Let speculators' command line make trainers that the callbacks watch.

    Args:
        callbacks: May be empty.
        trainer_class: What to make trainers of.
    """
    original = speculators_cli.Trainer

    def make(*args: Any, **kwargs: Any) -> Any:
        trainer = trainer_class(*args, **kwargs)
        if callbacks:
            hook_trainer(trainer, fan_out(callbacks))
        return trainer

    speculators_cli.Trainer = make
    try:
        yield
    finally:
        speculators_cli.Trainer = original
        close_all(callbacks)


def _adapted_line(adapted: Sequence[Finding]) -> str:
    flags = ", ".join(f"{f.subject} {f.message}" for f in adapted)
    return f"spec-export: no accelerator, training on the CPU; {flags or 'as asked'}"


def _tell(findings: Sequence[Finding]) -> None:
    for one in findings:
        _say(f"{one.severity}[{one.code}] {one.subject}: {one.message}")
        if one.hint:
            _say(f"  hint: {one.hint}")


def _say(text: str) -> None:
    """One line for a person; of several processes from the first one only."""
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
