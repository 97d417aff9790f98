"""Leg 1, *cast*: a live module against itself at the saved dtype."""

from __future__ import annotations

import time
from contextlib import ExitStack

import torch
from torch import nn

from spec_export.judge.block_probe import (
    block_rows,
    is_block,
    proposals,
)
from spec_export.judge.budget import fitting
from spec_export.judge.compare import (
    NARROW_FACTOR,
    calibrated,
    compare_logits,
)
from spec_export.judge.inputs import Inputs
from spec_export.judge.modes import (
    Change,
    ChangedWeights,
    SameExperts,
    jittered,
    rounded_to,
)
from spec_export.judge.mtp_probe import main_weight, routes
from spec_export.judge.parts import (
    dtype_name,
    findings_of,
    not_finite,
    over,
)
from spec_export.judge.probe import (
    drafting_module,
    training_logits,
)
from spec_export.judge.verdict import Leg


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
    saved dtype, or if rounding costs more than random errors of its size do. Costs
    three forwards of the rows: as it is, rounded, with random errors.

    Args:
        live_module: The module in training, or a wrapper of it.
        inputs: The rows.
        saved_dtype: Dtype of the export, or its name.
        steps: Chained draft steps.
        max_seconds: Time budget; fewer positions are compared where it is short.
    """
    leg, _, _ = cast_with_logits(
        live_module, inputs, saved_dtype, steps, max_seconds=max_seconds
    )
    return leg


def cast_with_logits(
    live_module: nn.Module,
    inputs: Inputs,
    saved_dtype: torch.dtype | str,
    steps: int = 3,
    *,
    max_seconds: float | None = None,
) -> tuple[Leg, Inputs, list[torch.Tensor]]:
    """``cast_leg``, the rows that it took, and their logits at the saved dtype."""
    began = time.monotonic()
    if isinstance(saved_dtype, str):
        saved_dtype = getattr(torch, saved_dtype)
        assert isinstance(saved_dtype, torch.dtype)
    draft = drafting_module(live_module)
    weight = main_weight(draft)
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
    experts = SameExperts()

    def logits(change: Change | None = None) -> list[torch.Tensor]:
        with ExitStack() as stack:
            if routes(draft):
                stack.enter_context(experts.run())
            if change is not None:
                stack.enter_context(ChangedWeights(change))
            return training_logits(live_module, inputs, steps)

    rounded = logits(rounded_to(saved_dtype))  # first: with experts of its own
    live = logits()
    metrics = compare_logits(live, rounded, inputs.rows())
    noise = compare_logits(live, logits(jittered(saved_dtype)), inputs.rows())
    what = f"random errors of half a unit of {dtype_name(saved_dtype)} in each weight"
    tolerance = calibrated(noise, weight.dtype, NARROW_FACTOR, what)
    problems = not_finite(live_module, saved_dtype)
    problems += over(metrics, tolerance, "logits")
    notes = [f"weights rounded to {dtype_name(saved_dtype)}", inputs.described()]
    if experts.moved:
        notes.append(
            f"{experts.moved[0]:.1%} of the tokens take other experts once weights "
            "are rounded; here both sides took the same ones, so no figure shows that"
        )
    leg = Leg(
        "cast",
        "fail" if problems else "pass",
        "; ".join(problems),
        device=str(weight.device),
        dtype=dtype_name(live[0].dtype),
        positions=len(inputs.rows()),
        steps=steps,
        metrics=metrics,
        tolerance=tolerance,
        notes=tuple(notes),
        seconds=time.monotonic() - began,
        findings=findings_of("cast", problems, [], asked, len(inputs)),
    )
    return leg, inputs, rounded
