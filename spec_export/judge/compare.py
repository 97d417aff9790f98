"""Metrics of two sets of logits, and what they may differ by."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from spec_export.judge.verdict import Leg, StepMetrics, Tolerance, not_run

__all__ = [
    "Leg",
    "StepMetrics",
    "Tolerance",
    "calibrated",
    "compare_logits",
    "fixed",
    "largest",
    "not_run",
]

# Rounding noise of one reordering is a sample; another path may differ by a few times
# as much. Wrong rules differ by thousands of times.
REORDERED_FACTOR = 8.0
NARROW_FACTOR = 4.0
SMALL_FLOAT32 = 1e-5
_CHUNK = 16  # rows in float64 at a time


def compare_logits(
    training: Sequence[torch.Tensor],
    serving: Sequence[torch.Tensor],
    rows: torch.Tensor | None = None,
) -> tuple[StepMetrics, ...]:
    """Compare logits step by step.

    Args:
        training: Per step [T, vocabulary].
        serving: The same shape, any float dtype, any device.
        rows: Rows to compare, int64 [N]; all by default.

    Returns:
        One entry per step. A difference that is not a number (NaN or infinity on
        either side) counts as infinite.
    """
    return tuple(
        _compare_step(step, a, b, rows)
        for step, (a, b) in enumerate(zip(training, serving, strict=True))
    )


def _compare_step(
    step: int, training: torch.Tensor, serving: torch.Tensor, rows: torch.Tensor | None
) -> StepMetrics:
    if training.shape[-1] != serving.shape[-1]:
        raise ValueError(
            f"logits of {training.shape[-1]} and {serving.shape[-1]} tokens"
        )
    where = torch.arange(training.shape[0]) if rows is None else rows.cpu()
    low, high, apart, agree = math.inf, -math.inf, 0.0, 0
    kls: list[torch.Tensor] = []
    for chunk in where.split(_CHUNK):
        a = training[chunk.to(training.device)].double()
        b = serving[chunk.to(serving.device)].to(a.device).double()
        low, high = min(low, a.min().item()), max(high, a.max().item())
        apart = max(apart, _finite((a - b).abs().max().item()))
        agree += int((a.argmax(-1) == b.argmax(-1)).sum())
        p, q = a.log_softmax(-1), b.log_softmax(-1)
        kls.append((p.exp() * (p - q)).sum(-1).clamp(min=0).cpu())
    kl = torch.cat(kls).nan_to_num(math.inf)
    worst = int(kl.argmax())
    return StepMetrics(
        step=step,
        max_abs=apart,
        max_rel=_finite(apart / max(high - low, 1e-300)),
        kl_mean=kl.mean().item(),
        kl_max=kl[worst].item(),
        kl_max_position=int(where[worst]),
        top1=agree / len(where),
    )


def _finite(value: float) -> float:
    return math.inf if math.isnan(value) else value


def largest(metrics: Sequence[StepMetrics]) -> float:
    """The largest ``max_rel`` of all steps."""
    return max((m.max_rel for m in metrics), default=0.0)


def fixed() -> Tolerance:
    """float32 and small shapes: 1e-5 of the logit range."""
    return Tolerance(SMALL_FLOAT32, "fixed: float32, small shapes")


def calibrated(
    noise: Sequence[StepMetrics], dtype: torch.dtype, factor: float, what: str
) -> Tolerance:
    """A tolerance from noise measured in this run.

    Args:
        noise: The module against itself, computed in another way.
        dtype: Dtype of the computation: no tolerance below its eps, since two paths
            can agree by luck.
        factor: How many times the noise is allowed.
        what: What the noise is of, for the record.
    """
    level = max(largest(noise), torch.finfo(dtype).eps)
    kl = max((m.kl_max for m in noise), default=0.0)
    return Tolerance(
        factor * level,
        f"calibrated: {factor:g} x the noise of {what} ({level:.2e})",
        # It grows with the square of a difference.
        max(factor**2 * kl, fixed().max_kl),
    )
