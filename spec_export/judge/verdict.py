"""What a leg of the comparison says. No torch here: "not run" must be sayable."""

from __future__ import annotations

import math
import sys
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from spec_export.findings import Finding

LegName = Literal["cast", "layout", "engine"]
Verdict = Literal["pass", "fail", "not run"]
# How the note begins that says how acceptance lengths were counted.
ACCEPTANCE = "acceptance: "


@dataclass(frozen=True)
class StepMetrics:
    """How far two sets of logits of one draft step are apart.

    Attributes:
        step: Draft step, 0 is the first.
        max_abs: Largest absolute logit difference.
        max_rel: ``max_abs`` over the logit range (max - min of the training side).
        kl_mean: KL(training ‖ serving) in nats, summed over the vocabulary, mean
            over the positions.
        kl_max: The largest KL of one position.
        kl_max_position: The row of that position in the inputs.
        top1: Share of positions at which both sides prefer the same token.
    """

    step: int
    max_abs: float
    max_rel: float
    kl_mean: float
    kl_max: float
    kl_max_position: int
    top1: float


@dataclass(frozen=True)
class Tolerance:
    """What a leg may differ by, and where that number comes from.

    Attributes:
        max_rel: Largest ``StepMetrics.max_rel`` that passes.
        max_kl: Largest ``StepMetrics.kl_max`` that passes: where one logit makes the
            range huge, the others may be wrong within ``max_rel``.
        source: How it was obtained, e.g. ``fixed: float32, small shapes`` or
            ``calibrated: 8 x the noise of reordered sums in this run``.
    """

    max_rel: float
    source: str
    max_kl: float = 1e-5


@dataclass(frozen=True)
class PromptRounds:
    """Verification rounds of one prompt in the real engine, and what was expected.

    Attributes:
        served: How many rounds accepted 0, 1, ... drafts in SGLang.
        expected: The same by the training side.
        closest: The smallest difference of logits, as a share of their range, that
            has to be overturned to come from one to the other; 0 where they are equal.
        target_gap: By how much transformers' target prefers another token than
            SGLang's anywhere in the continuation; a share of its range too.
        counted: Whether the prompt is evidence.
        accepting: Expected rounds that accept a draft.
        refusing: Expected rounds that accept fewer than the draft vocabulary allows.
    """

    served: tuple[int, ...]
    expected: tuple[int, ...]
    closest: float
    target_gap: float
    counted: bool
    accepting: int
    refusing: int


@dataclass(frozen=True)
class Leg:
    """One leg of the comparison, as the manifest records it.

    Attributes:
        leg: Which one.
        verdict: ``pass``, ``fail`` or ``not run``.
        reason: Why it failed or did not run; empty on a pass.
        device: ``cpu``, ``cuda:0``; None if it did not run.
        dtype: The dtype of the computation, ``float32`` or ``bfloat16``.
        positions: Rows compared (padding excluded); of the engine its rounds.
        steps: Chained draft steps.
        metrics: One entry per step.
        free_running: One entry per step of greedy chains in which the drafted tokens
            are fed back through each side's own token map.
        acceptance: Mean acceptance length, bonus token included, of greedy chains along
            recorded text, ``training_vs_...`` and ``serving_vs_...``: verified by the
            target's own choice (``target_greedy``), or by the text where that is not
            known (``text``). None without recorded text.
        tolerance: What was allowed.
        diagnosis: On failure, sentences that name the stage and the tensor.
        notes: What a reader should know about the way it was compared.
        seconds: How long it took.
        prompts: Of the engine, one entry per prompt.
        sglang: Of the engine, the release that ran or would have.
        findings: ``comparison-failed``, ``comparison-reduced`` and the like, for the
            caller to report (not part of ``to_json``: findings have their own place).
    """

    leg: LegName
    verdict: Verdict
    reason: str = ""
    device: str | None = None
    dtype: str | None = None
    positions: int = 0
    steps: int = 0
    metrics: tuple[StepMetrics, ...] = ()
    free_running: tuple[StepMetrics, ...] = ()
    acceptance: dict[str, float] | None = None
    tolerance: Tolerance | None = None
    diagnosis: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    prompts: tuple[PromptRounds, ...] = ()
    sglang: str | None = None
    findings: tuple[Finding, ...] = field(default=(), compare=False)

    @property
    def ran(self) -> bool:
        """Whether logits were compared."""
        return self.verdict != "not run"

    @property
    def passed(self) -> bool:
        """Whether it ran and passed."""
        return self.verdict == "pass"

    def to_json(self) -> dict[str, Any]:
        """The leg as ``comparison[leg]`` of the manifest.

        JSON has no infinity: it becomes the largest float.
        """
        out = asdict(self)
        out.pop("findings")
        out.pop("leg")
        out["ran"] = self.ran
        out["seconds"] = round(self.seconds, 3)
        for key in ("metrics", "free_running", "diagnosis", "notes", "prompts"):
            out[key] = list(out[key])
        for step in (*out["metrics"], *out["free_running"], *out["prompts"]):
            for key, value in step.items():
                if isinstance(value, float) and not math.isfinite(value):
                    step[key] = sys.float_info.max
        return out


def not_run(leg: LegName, reason: str) -> Leg:
    """A leg that did not run, with the reason why; needs no torch."""
    return Leg(leg, "not run", reason)
