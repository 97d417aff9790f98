"""The parts of a leg: opening, serving, chains, tolerances, what is said."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from spec_export.findings import Finding, error, warning
from spec_export.judge.block_probe import is_block
from spec_export.judge.compare import (
    NARROW_FACTOR,
    REORDERED_FACTOR,
    calibrated,
    compare_logits,
    largest,
)
from spec_export.judge.inputs import Inputs, document_spans
from spec_export.judge.modes import (
    Change,
    ReorderedSums,
    rounded_scaled,
)
from spec_export.judge.probe import (
    LOSS_ONLY,
    drafting_module,
    free_chain,
    training_logits,
)
from spec_export.judge.reference import load_reference
from spec_export.judge.reference.block import BlockReference
from spec_export.judge.reference.block_config import served_scale
from spec_export.judge.reference.eagle3 import Eagle3Reference
from spec_export.judge.reference.mtp import MtpReference
from spec_export.judge.reference.serving_config import (
    ReferenceUnsupported,
    ServingError,
)
from spec_export.judge.target import TargetUnreadable, target_tensors
from spec_export.judge.verdict import Leg, LegName, StepMetrics, Tolerance, not_run

Reference = Eagle3Reference | BlockReference | MtpReference
NEWEST = "0.5.23"
# Up to here the fixed bound holds for float32.
SMALL_HIDDEN = 512
CHAIN_POSITIONS = 32
PROBE_NOTE = (
    "from the probe of the export: the largest logits of each position, log sums and "
    "projections; the KL is a lower bound"
)


def open_reference(
    folder: Path,
    target: Path | None,
    embed: torch.Tensor | None,
    head: torch.Tensor | None,
    release: str,
    device: str | torch.device,
    window: int | None,
    dtype: torch.dtype,
    about: Mapping[str, Any] | None = None,
) -> Reference | Leg:
    """The serving side, or the leg that says why there is none.

    ``about`` is the target's configuration.
    """
    try:
        if target is not None:
            embed, head = target_tensors(target)
        reference = load_reference(
            folder,
            embed=embed,
            head=head,
            release=release,
            dtype=dtype,
            device=device,
            window=window,
        )
        if isinstance(reference, BlockReference):
            reference.embed_scale = served_scale(about)
        return reference
    except ServingError as problem:
        return failed_leg("layout", f"SGLang would not load it: {problem}", ())
    except (TypeError, KeyError) as problem:  # as SGLang itself over such a config
        why = f"{type(problem).__name__}: {problem}"
        return failed_leg("layout", f"SGLang would not load it: {why}", ())
    except (ReferenceUnsupported, TargetUnreadable) as problem:
        said = warning("comparison-not-run", "comparison.layout", str(problem))
        return replace(not_run("layout", str(problem)), findings=(said,))


def scaled_weights(draft: Any, reference: Reference) -> dict[int, Change]:
    """What rounding does to weights that SGLang has to get scaled.

    Where the target scales its embedding, so has to be whatever is added to the
    residual or goes into another norm. By what is no power of two, that rounds twice.

    Returns:
        ``id`` of the parameter to its change; empty where nothing is rounded twice.
    """
    scale = reference.embed_scale if isinstance(reference, BlockReference) else 1.0
    return _rounded_twice(draft, scale, reference.config.dtype)


def round_as_saved(
    module: nn.Module, target: Mapping[str, Any] | None, saved: str
) -> None:
    """Give a module of ours what its export holds of ``scaled_weights``, in place.

    Args:
        module: The training side, rounded to the saved dtype.
        target: The target's ``config.json``.
        saved: Dtype of the export.
    """
    draft = drafting_module(module)
    scale = served_scale(target) if is_block(draft) else 1.0
    changes = _rounded_twice(draft, scale, saved)
    for parameter in draft.parameters():
        if (change := changes.get(id(parameter))) is not None:
            parameter.data = change(parameter.data)


def _rounded_twice(draft: Any, scale: float, saved: str) -> dict[int, Change]:
    if saved == "float32" or math.frexp(scale)[0] == 0.5:
        return {}
    change = rounded_scaled(getattr(torch, saved), scale)
    return {
        id(parameter): change
        for name, parameter in draft.named_parameters()
        if name.split(".")[-2] in ("fc", "q_proj", "k_proj", "o_proj", "down_proj")
    }


def blind_leg(reason: str) -> Leg:
    """Nothing was compared that could have differed: no verdict."""
    reason = f"the comparison would show nothing: {reason}"
    said = warning("comparison-not-run", "comparison.layout", reason)
    return replace(not_run("layout", reason), findings=(said,))


def failed_leg(name: LegName, reason: str, diagnosis: Sequence[str]) -> Leg:
    """A leg that failed before or instead of comparing logits."""
    return Leg(
        name,
        "fail",
        reason,
        diagnosis=tuple(diagnosis),
        findings=findings_of(name, [reason], diagnosis, 0, 0),
    )


def serve(reference: Reference, inputs: Inputs, steps: int) -> list[torch.Tensor]:
    """Teacher-forced logits of the serving side, per step.

    Raises:
        ServingError: SGLang would fail over this configuration.
    """
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


def compare_chain(
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
    longest = min(CHAIN_POSITIONS, shortest_window(reference))
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


def layout_tolerance(
    training: Callable[..., list[torch.Tensor]],
    inputs: Inputs,
    trained: list[torch.Tensor],
    dtype: torch.dtype,
) -> Tolerance:
    """What two correct computations may differ by, measured in this run."""
    if dtype is not torch.float32:
        exact = training(inputs, torch.float32)
        noise = compare_logits(exact, trained, inputs.rows())
        return calibrated(
            noise, dtype, NARROW_FACTOR, f"{dtype_name(dtype)} arithmetic"
        )
    # SGLang counts positions from 0 and speculators from 1.
    with ReorderedSums():
        again = training(inputs.shifted(1))
    noise = compare_logits(trained, again, inputs.rows())
    return calibrated(noise, dtype, REORDERED_FACTOR, "reordered sums")


def is_small(hidden: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the fixed bound holds."""
    exact = dtype is torch.float32 and torch.device(device).type == "cpu"
    return exact and hidden <= SMALL_HIDDEN


def problems_of(
    reference: Reference,
    metrics: Sequence[StepMetrics],
    tolerance: Tolerance,
) -> list[str]:
    """What is wrong after loading and comparing; empty: nothing is."""
    random = [k for k, v in reference.report.missing.items() if v == "random"]
    problems = [f"{name} is uninitialised memory in SGLang" for name in random]
    problems += [
        f"two tensors of the export set {name}" for name in reference.report.doubled
    ]
    return problems + over(metrics, tolerance, "logits")


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def over(metrics: Sequence[StepMetrics], tolerance: Tolerance, what: str) -> list[str]:
    """What exceeds a tolerance, in words."""
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


def shortest_window(reference: Reference) -> float:
    """The smallest window of a layer in positions; infinite without one."""
    layers = range(reference.config.num_layers)
    windows = [w for i in layers if (w := reference.window_of(i)) is not None]
    return min(windows, default=math.inf)


def not_finite(module: nn.Module, dtype: torch.dtype) -> list[str]:
    """Weights that the saved dtype cannot hold: their extremes tell, NaN included."""
    return [
        f"{name} is not finite as {dtype_name(dtype)}"
        for name, value in drafting_module(module).named_parameters()
        if name.split(".")[0] not in LOSS_ONLY
        and not all(
            bool(extreme.to(dtype).isfinite())
            for extreme in (value.detach().amin(), value.detach().amax())
        )
    ]


def notes_on(reference: Reference, inputs: Inputs) -> tuple[str, ...]:
    """What a reader should know about loading and windows."""
    notes = []
    if reference.report.dropped:
        names = ", ".join(reference.report.dropped)
        notes.append(f"tensors of the export that SGLang drops: {names}")
    ones = [k for k, v in reference.report.missing.items() if v == "ones"]
    if ones:
        notes.append(f"norms that stay at ones in SGLang: {', '.join(ones)}")
    longest = max(b - a for a, b in document_spans(inputs.document_ids))
    if longest > shortest_window(reference):
        notes.append(
            f"a window of {shortest_window(reference):.0f} positions back is counted "
            "from the first drafted position, as in training; SGLang's moves on with "
            "each drafted token, and its backends count it to within one position: "
            "both differences are accepted and not compared"
        )
    return tuple(notes)


def rounding_notes(
    once: list[torch.Tensor], twice: list[torch.Tensor], rows: torch.Tensor
) -> tuple[str, ...]:
    """What it costs that scaled weights are rounded twice.

    Args:
        once: Logits of training, rounded to the saved dtype.
        twice: The same with what the scaled weights mean.
        rows: Those compared.
    """
    cost = compare_logits(once, twice, rows)
    kl = max(m.kl_mean for m in cost)
    note = (
        "weights that are saved as much larger as the target's embedding is were "
        f"rounded twice, and compared as they are then: that moves logits by up to "
        f"{largest(cost):.1e} of their range, the mean KL is {kl:.1e} nats, top-1 "
        f"agrees at {min(m.top1 for m in cost):.1%}"
    )
    return (note,)


def findings_of(
    name: LegName,
    problems: Sequence[str],
    diagnosis: Sequence[str],
    asked: int,
    used: int,
) -> tuple[Finding, ...]:
    """The findings of a leg: a failure, fewer rows than asked for."""
    out = []
    if problems:
        hint = "; ".join(diagnosis) or None
        subject = f"comparison.{name}"
        out.append(error("comparison-failed", subject, "; ".join(problems), hint))
    if used < asked:
        message = f"{used} of {asked} positions fit into the time allowed"
        out.append(warning("comparison-reduced", f"comparison.{name}", message))
    return tuple(out)
