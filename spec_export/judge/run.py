"""The legs of the comparison, end to end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from spec_export.findings import Finding, error, warning
from spec_export.judge.block_probe import (
    block_differences,
    block_rows,
    diagnose_block,
    is_block,
    proposals,
)
from spec_export.judge.budget import fitting
from spec_export.judge.checks import (
    blind_inputs,
    blind_logits,
    capture_problems,
    config_of,
    dtype_problems,
    relabel,
    trained_layers,
)
from spec_export.judge.compare import (
    NARROW_FACTOR,
    REORDERED_FACTOR,
    calibrated,
    compare_logits,
    fixed,
    largest,
)
from spec_export.judge.diagnose import diagnose
from spec_export.judge.explain import token_map_differences
from spec_export.judge.inputs import Inputs, document_spans
from spec_export.judge.modes import (
    ChangedWeights,
    ReorderedSums,
    jittered,
    rounded_to,
)
from spec_export.judge.mtp_probe import first_step_note, main_weight
from spec_export.judge.probe import (
    LOSS_ONLY,
    drafting_module,
    free_chain,
    target_ids,
    training_logits,
)
from spec_export.judge.reference import load_reference
from spec_export.judge.reference.block import BlockReference
from spec_export.judge.reference.eagle3 import Eagle3Reference
from spec_export.judge.reference.mtp import MtpReference
from spec_export.judge.reference.serving_config import (
    ReferenceUnsupported,
    ServingError,
)
from spec_export.judge.seeded import digest
from spec_export.judge.stored_probe import Probe, save_probe
from spec_export.judge.target import TargetUnreadable, target_tensors
from spec_export.judge.verdict import Leg, LegName, StepMetrics, Tolerance, not_run

Reference = Eagle3Reference | BlockReference | MtpReference
NEWEST = "0.5.23"
# Up to here the fixed bound of design.md 7 holds for float32.
SMALL_HIDDEN = 512
CHAIN_POSITIONS = 32
PROBE_NOTE = (
    "from the probe of the export: the largest logits of each position, log sums and "
    "projections; the KL is a lower bound"
)


def layout_leg(
    folder: Path,
    module: nn.Module,
    inputs: Inputs,
    *,
    target: Path | None = None,
    target_config: Mapping[str, Any] | None = None,
    embed: torch.Tensor | None = None,
    head: torch.Tensor | None = None,
    release: str = NEWEST,
    device: str | torch.device = "cpu",
    steps: int = 3,
    window: int | None = None,
    max_seconds: float | None = None,
    saved_dtype: torch.dtype | None = None,
    write_probe: bool = False,
    probe_metadata: Mapping[str, Any] | None = None,
) -> Leg:
    """Leg 2: the training module against what SGLang makes of the export.

    The serving side reads the export folder and the target's embedding and head only.
    Compared are teacher-forced chained steps on all rows, greedy chains in which the
    drafted tokens are fed back, and the whole token map.

    Args:
        folder: The export.
        module: The training side (``training_module``, or a live module); its dtype is
            that of the computation on both sides. Not for FSDP: rebuild the module
            from a snapshot.
        inputs: The rows.
        target: Folder of the target model, opened here.
        target_config: Its ``config.json``, where it is not in that folder: it decides
            which layers' features SGLang takes.
        embed: The target's embedding, instead of ``target``.
        head: The target's head, where SGLang takes it from there.
        release: SGLang release whose rules apply.
        device: Where the serving side computes.
        steps: Chained draft steps.
        window: ``--speculative-draft-window-size`` of the launch line.
        max_seconds: Time budget; fewer positions are compared where it is short.
        saved_dtype: Round the training side's weights to it, for a live module.
        write_probe: Write ``folder/probe/`` unless the leg fails.
        probe_metadata: JSON values to keep in the probe.

    Returns:
        The leg; never raises for what SGLang would refuse (that is a failed leg).
    """
    began = time.monotonic()
    dtype = main_weight(drafting_module(module)).dtype
    reference = _open_reference(
        folder, target, embed, head, release, device, window, dtype
    )
    if isinstance(reference, Leg):
        return reference
    draft = drafting_module(module)
    relabelled = relabel(reference, target_ids(module))
    if isinstance(reference, BlockReference):
        steps, inputs = proposals(draft), block_rows(draft, inputs)
    blind = blind_inputs(inputs, block=is_block(draft))
    if blind is not None:
        return _blind(blind)

    saved = saved_dtype or dtype

    def training(rows: Inputs, compute: torch.dtype = dtype) -> list[torch.Tensor]:
        with ChangedWeights(lambda w: w.to(saved).to(compute)):
            return training_logits(module, rows, steps, compute=compute)

    asked = len(inputs)
    if max_seconds is not None:
        # Training, serving and reordered sums; then a chain of few rows.
        inputs = fitting(inputs, max_seconds, training, reference.device, full=3, few=3)
    try:
        if isinstance(reference, BlockReference):
            wrong = block_differences(reference, draft)
            if wrong:
                return _failed("layout", "; ".join(wrong), ())
        trained = training(inputs)
        blind = blind_logits(trained, inputs.rows())
        if blind is not None:
            return _blind(blind)
        served = _serve(reference, inputs, steps)
        metrics = compare_logits(trained, served, inputs.rows())
    except (ServingError, ValueError) as problem:
        return _failed("layout", str(problem), ())
    if _is_small(draft.hidden_size, dtype, reference.device):
        tolerance = fixed()
    else:
        tolerance = _layout_tolerance(training, inputs, trained, dtype)
    problems = _problems(reference, metrics, tolerance)
    trained_on = trained_layers(draft.config)
    about = target_config or config_of(target)
    problems += capture_problems(folder, about, trained_on, release)
    if not isinstance(reference, MtpReference):  # a copy of its target holds several
        problems += dtype_problems(folder, reference.config.dtype)
    problems += token_map_differences(reference, target_ids(module))
    chains: tuple[StepMetrics, ...] = ()
    if not problems and not isinstance(reference, MtpReference):
        with ChangedWeights(rounded_to(saved)):
            chains = _compare_chain(module, reference, inputs, steps, trained)
        problems = _over(chains, tolerance, "logits of the free-running chain")
    diagnosis: list[str] = []
    if problems:
        with ChangedWeights(rounded_to(saved)):
            level = tolerance.max_rel
            if not isinstance(reference, Eagle3Reference):
                diagnosis = _diagnose_block(module, reference, inputs, level)
            else:
                diagnosis = diagnose(module, reference, inputs, steps, level, saved)
    elif write_probe:
        save_probe(
            folder,
            inputs,
            trained,
            hot_ids=target_ids(module),
            tolerance=tolerance,
            layers=trained_on,
            metadata=probe_metadata,
        )
    return Leg(
        "layout",
        "fail" if problems else "pass",
        "; ".join(problems),
        device=str(reference.device),
        dtype=_name(dtype),
        positions=len(inputs.rows()),
        steps=steps,
        metrics=metrics,
        free_running=chains,
        tolerance=tolerance,
        diagnosis=tuple(diagnosis),
        notes=(
            *relabelled,
            *_notes(reference, inputs),
            *first_step_note(draft, inputs, target),
        ),
        seconds=time.monotonic() - began,
        findings=_findings("layout", problems, diagnosis, asked, len(inputs)),
    )


def probe_leg(
    folder: Path,
    probe: Probe,
    *,
    target: Path | None = None,
    embed: torch.Tensor | None = None,
    head: torch.Tensor | None = None,
    release: str = NEWEST,
    device: str | torch.device = "cpu",
    window: int | None = None,
) -> Leg:
    """Leg 2 repeated from the probe that travels with an export.

    Needs neither speculators nor the training module. The tolerance is the larger of
    the recorded one, which is believed up to ``stored_probe.BELIEVED``, and the noise
    of the serving reference on this machine; for small shapes on a CPU the fixed one.

    Args:
        folder: The export.
        probe: ``load_probe(folder)``.
        target: Folder of the target model.
        embed: The target's embedding, instead of ``target``.
        head: The target's head.
        release: SGLang release whose rules apply.
        device: Where to compute, in float32.
        window: ``--speculative-draft-window-size`` of the launch line.
    """
    began = time.monotonic()
    dtype, inputs = torch.float32, probe.inputs
    reference = _open_reference(
        folder, target, embed, head, release, device, window, dtype
    )
    if isinstance(reference, Leg):
        return reference
    ids = torch.arange(reference.config.draft_vocab_size)
    relabelled: tuple[str, ...] = ()
    if digest(reference.to_target(ids).cpu().long()) != probe.hot_ids_digest:
        # The probe does not hold the order of training, which is ascending.
        relabelled = relabel(reference, reference.to_target(ids).cpu().sort().values)
    try:
        served = _serve(reference, inputs, probe.steps)
        metrics = probe.compare(served)
    except (ServingError, RuntimeError, ValueError) as problem:
        return _failed("layout", str(problem), ())
    tolerance = fixed()
    exact = probe.dtype == _name(dtype)
    if not (exact and _is_small(reference.config.hidden_size, dtype, reference.device)):
        with ReorderedSums():
            again = _serve(reference, inputs.shifted(1), probe.steps)
        noise = compare_logits(served, again, inputs.rows())
        here = calibrated(noise, dtype, REORDERED_FACTOR, "reordered sums")
        tolerance = max(probe.believed(), here, key=lambda t: t.max_rel)
    problems = _problems(reference, metrics, tolerance)
    problems += capture_problems(folder, config_of(target), probe.layers, release)
    if digest(reference.to_target(ids).cpu().long()) != probe.hot_ids_digest:
        problems.append("the token map is not the one of training")
    return Leg(
        "layout",
        "fail" if problems else "pass",
        "; ".join(problems),
        device=str(reference.device),
        dtype=_name(dtype),
        positions=len(inputs.rows()),
        steps=probe.steps,
        metrics=metrics,
        tolerance=tolerance,
        notes=(PROBE_NOTE, *relabelled, *_notes(reference, inputs)),
        seconds=time.monotonic() - began,
        findings=_findings("layout", problems, [], len(inputs), len(inputs)),
    )


def cast_leg(
    live_module: nn.Module,
    inputs: Inputs,
    saved_dtype: torch.dtype | str,
    steps: int = 3,
    *,
    max_seconds: float | None = None,
) -> Leg:
    """Leg 1: a live module against the same with its weights at the saved dtype.

    Weights are rounded one by one where they are used, so the live module is left
    untouched, bit for bit, and no second copy exists. Under FSDP2 every rank must call
    this (a forward is a collective). Fails if a weight or logit is not finite at the
    saved dtype, or if rounding costs more than random errors of its size do.

    Args:
        live_module: The module in training, or a wrapper of it.
        inputs: The rows.
        saved_dtype: Dtype of the export, or its name.
        steps: Chained draft steps.
        max_seconds: Time budget; fewer positions are compared where it is short.
    """
    began = time.monotonic()
    if isinstance(saved_dtype, str):
        saved_dtype = getattr(torch, saved_dtype)
        assert isinstance(saved_dtype, torch.dtype)
    weight = main_weight(drafting_module(live_module))
    asked = len(inputs)
    draft = drafting_module(live_module)
    if is_block(draft):
        steps, inputs = proposals(draft), block_rows(draft, inputs)
        asked = len(inputs)
    if max_seconds is not None:
        inputs = fitting(
            inputs,
            max_seconds,
            lambda rows: training_logits(live_module, rows, steps),
            weight.device,
            full=3,
            together=hasattr(weight, "device_mesh"),
        )
    live = training_logits(live_module, inputs, steps)
    with ChangedWeights(rounded_to(saved_dtype)):
        rounded = training_logits(live_module, inputs, steps)
    metrics = compare_logits(live, rounded, inputs.rows())
    del rounded
    with ChangedWeights(jittered(saved_dtype)):
        noisy = training_logits(live_module, inputs, steps)
    noise = compare_logits(live, noisy, inputs.rows())
    what = f"random errors of half a unit of {_name(saved_dtype)} in each weight"
    tolerance = calibrated(noise, weight.dtype, NARROW_FACTOR, what)
    problems = _not_finite(live_module, saved_dtype)
    problems += _over(metrics, tolerance, "logits")
    return Leg(
        "cast",
        "fail" if problems else "pass",
        "; ".join(problems),
        device=str(weight.device),
        dtype=_name(live[0].dtype),
        positions=len(inputs.rows()),
        steps=steps,
        metrics=metrics,
        tolerance=tolerance,
        notes=(f"weights rounded to {_name(saved_dtype)}",),
        seconds=time.monotonic() - began,
        findings=_findings("cast", problems, [], asked, len(inputs)),
    )


def _diagnose_block(
    module: nn.Module,
    reference: BlockReference | MtpReference,
    inputs: Inputs,
    level: float,
) -> list[str]:
    """Both sides once more on a few rows of one document, stage by stage."""
    one = inputs.first(16)
    one = replace(one, document_ids=torch.zeros_like(one.document_ids), seed=None)
    trained: list[tuple[str, torch.Tensor]] = []
    served: list[tuple[str, torch.Tensor]] = []
    training_logits(module, one, 1, on_output=lambda n, v: trained.append((n, v)))
    reference.teacher_forced(
        one.token_ids,
        one.aux,
        one.position_ids,
        one.document_ids,
        1,
        lambda _, n, v: served.append((n, v)),
    )
    return diagnose_block(trained, served, level)


def engine_leg(reason: str) -> Leg:
    """Leg 3 of a process that does not run SGLang: ``not run``, with the reason."""
    return not_run("engine", reason)


# --- parts --------------------------------------------------------------------------


def _open_reference(
    folder: Path,
    target: Path | None,
    embed: torch.Tensor | None,
    head: torch.Tensor | None,
    release: str,
    device: str | torch.device,
    window: int | None,
    dtype: torch.dtype,
) -> Reference | Leg:
    """The serving side, or the leg that says why there is none."""
    try:
        if target is not None:
            embed, head = target_tensors(target)
        return load_reference(
            folder,
            embed=embed,
            head=head,
            release=release,
            dtype=dtype,
            device=device,
            window=window,
        )
    except ServingError as problem:
        return _failed("layout", f"SGLang would not load it: {problem}", ())
    except (TypeError, KeyError) as problem:  # as SGLang itself over such a config
        why = f"{type(problem).__name__}: {problem}"
        return _failed("layout", f"SGLang would not load it: {why}", ())
    except (ReferenceUnsupported, TargetUnreadable) as problem:
        said = warning("comparison-not-run", "comparison.layout", str(problem))
        return replace(not_run("layout", str(problem)), findings=(said,))


def _blind(reason: str) -> Leg:
    """Nothing was compared that could have differed: no verdict."""
    reason = f"the comparison would show nothing: {reason}"
    said = warning("comparison-not-run", "comparison.layout", reason)
    return replace(not_run("layout", reason), findings=(said,))


def _failed(name: LegName, reason: str, diagnosis: Sequence[str]) -> Leg:
    return Leg(
        name,
        "fail",
        reason,
        diagnosis=tuple(diagnosis),
        findings=_findings(name, [reason], diagnosis, 0, 0),
    )


def _serve(reference: Reference, inputs: Inputs, steps: int) -> list[torch.Tensor]:
    try:
        return reference.teacher_forced(
            inputs.token_ids,
            inputs.aux,
            inputs.position_ids,
            inputs.document_ids,
            steps,
        )
    except (TypeError, KeyError) as problem:  # as SGLang itself over such a config
        why = f"{type(problem).__name__}: {problem}"
        raise ServingError(f"SGLang would fail: {why}") from problem


def _compare_chain(
    module: nn.Module,
    reference: Eagle3Reference | BlockReference,
    inputs: Inputs,
    steps: int,
    trained: list[torch.Tensor],
) -> tuple[StepMetrics, ...]:
    """A greedy chain: each side feeds back through its own token map.

    It runs in the shortest document that is long enough, or its first rows, and not
    beyond a window: a server's window moves with the drafted tokens, training's does
    not.
    """
    longest = min(CHAIN_POSITIONS, _shortest_window(reference))
    spans = [s for s in document_spans(inputs.document_ids) if s[1] - s[0] > steps]
    start, end = min(spans, key=lambda s: s[1] - s[0], default=(0, 0))
    end = int(min(end, start + longest))
    if end - start <= steps:
        return ()
    last = end - steps
    first = trained[0][last].argmax()
    rows, drafted = free_chain(module, inputs.part(start, end), steps, first)
    prefix = rows.part(0, last - start + 1)
    serving, _ = reference.free_running(
        prefix.token_ids, prefix.aux, prefix.position_ids, steps, drafted
    )
    training = [
        step[last - start][None] for step in training_logits(module, rows, steps)
    ]
    return compare_logits(training, list(serving[:, None]))


def _layout_tolerance(
    training: Callable[..., list[torch.Tensor]],
    inputs: Inputs,
    trained: list[torch.Tensor],
    dtype: torch.dtype,
) -> Tolerance:
    """What two correct computations may differ by, measured in this run."""
    if dtype is not torch.float32:
        exact = training(inputs, torch.float32)
        noise = compare_logits(exact, trained, inputs.rows())
        return calibrated(noise, dtype, NARROW_FACTOR, f"{_name(dtype)} arithmetic")
    # SGLang counts positions from 0 and speculators from 1.
    with ReorderedSums():
        again = training(inputs.shifted(1))
    noise = compare_logits(trained, again, inputs.rows())
    return calibrated(noise, dtype, REORDERED_FACTOR, "reordered sums")


def _is_small(hidden: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the fixed bound of design.md 7 holds."""
    exact = dtype is torch.float32 and torch.device(device).type == "cpu"
    return exact and hidden <= SMALL_HIDDEN


def _problems(
    reference: Reference,
    metrics: Sequence[StepMetrics],
    tolerance: Tolerance,
) -> list[str]:
    random = [k for k, v in reference.report.missing.items() if v == "random"]
    problems = [f"{name} is uninitialised memory in SGLang" for name in random]
    problems += [
        f"two tensors of the export set {name}" for name in reference.report.doubled
    ]
    return problems + _over(metrics, tolerance, "logits")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _over(metrics: Sequence[StepMetrics], tolerance: Tolerance, what: str) -> list[str]:
    if largest(metrics) <= tolerance.max_rel:
        kl = max((m.kl_max for m in metrics), default=0.0)
        if kl <= tolerance.max_kl:
            return []
        return [f"{what}: a KL of {kl:.2e} nats (allowed: {tolerance.max_kl:.2e})"]
    worst = max(metrics, key=lambda m: m.max_rel)
    first = next(m for m in metrics if m.max_rel > tolerance.max_rel)
    said = f"{what} differ by {worst.max_rel:.2e} of their range"
    allowed = f"(allowed: {tolerance.max_rel:.2e})"
    return [f"{said} {allowed}, from step {first.step} on"]


def _shortest_window(reference: Reference) -> float:
    layers = range(reference.config.num_layers)
    windows = [w for i in layers if (w := reference.window_of(i)) is not None]
    return min(windows, default=math.inf)


def _not_finite(module: nn.Module, dtype: torch.dtype) -> list[str]:
    """Weights that the saved dtype cannot hold."""
    return [
        f"{name} is not finite as {_name(dtype)}"
        for name, value in drafting_module(module).named_parameters()
        if name.split(".")[0] not in LOSS_ONLY
        and not bool(value.detach().to(dtype).isfinite().all())
    ]


def _notes(reference: Reference, inputs: Inputs) -> tuple[str, ...]:
    notes = []
    if reference.report.dropped:
        names = ", ".join(reference.report.dropped)
        notes.append(f"tensors of the export that SGLang drops: {names}")
    ones = [k for k, v in reference.report.missing.items() if v == "ones"]
    if ones:
        notes.append(f"norms that stay at ones in SGLang: {', '.join(ones)}")
    longest = max(b - a for a, b in document_spans(inputs.document_ids))
    if longest > _shortest_window(reference):
        notes.append(
            f"a window of {_shortest_window(reference):.0f} positions back is counted "
            "from the first drafted position, as in training; SGLang's moves on with "
            "each drafted token, and its backends count it to within one position: "
            "both differences are accepted and not compared"
        )
    return tuple(notes)


def _findings(
    name: LegName,
    problems: Sequence[str],
    diagnosis: Sequence[str],
    asked: int,
    used: int,
) -> tuple[Finding, ...]:
    out = []
    if problems:
        hint = "; ".join(diagnosis) or None
        subject = f"comparison.{name}"
        out.append(error("comparison-failed", subject, "; ".join(problems), hint))
    if used < asked:
        message = f"{used} of {asked} positions fit into the time allowed"
        out.append(warning("comparison-reduced", f"comparison.{name}", message))
    return tuple(out)
