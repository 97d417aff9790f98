"""Rounds that a draft should have, and whether other ones are explained by arithmetic.

The target's continuation of a prompt is given. At each place where a round may start
it is asked how many of the draft's tokens are right, and by how much: where two tokens
of a draft are nearly as good, an engine may take the other one. ``closest`` finds the
smallest difference of logits, as a share of their range, that has to be overturned to
end with the histogram that an engine reported: zero where it is the expected one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from spec_export.judge.engine.side import Side
from spec_export.judge.inputs import Inputs
from spec_export.judge.verdict import PromptRounds, Tolerance, Verdict

# A prompt is evidence if so many of its rounds are decided beyond the tolerance.
DECIDED = 0.5
# A pass needs so many rounds that accepted a draft, and as many that refused one: a
# draft that is never right, or always, has the same rounds however it is broken.
EVIDENCE = 10


@dataclass(frozen=True)
class Served:
    """What SGLang made of one prompt.

    Attributes:
        output_ids: The new tokens.
        histogram: How many rounds accepted 0, 1, ... drafts.
    """

    output_ids: list[int]
    histogram: list[int]


@dataclass(frozen=True)
class Text:
    """A prompt and its continuation, as the target saw it.

    Attributes:
        prompt: Number of tokens of the prompt.
        end: Number of tokens of prompt and continuation.
        tokens: [end + proposed tokens] int64; the last round may look that far.
        aux: [end, layers * width] float32, the target's features.
        exact: The same in float32, where ``aux`` is of a narrower computation.
        gap: The largest preference of the target for another token than the text's.
    """

    prompt: int
    end: int
    tokens: torch.Tensor
    aux: torch.Tensor
    exact: torch.Tensor | None
    gap: float


@dataclass(frozen=True)
class Flips:
    """What it takes to make a draft right or wrong, as shares of the logit range.

    Attributes:
        right: Entry [n][k]: draft k of a round that starts behind token n becomes
            right; 0 if it is, infinite if its vocabulary lacks the token.
        wrong: The same: it becomes wrong; 0 if it is.
    """

    right: list[list[float]]
    wrong: list[list[float]]

    def cost(self, newest: int, accepted: int) -> float:
        """What it takes for a round to accept exactly so many drafts."""
        right, wrong = self.right[newest], self.wrong[newest]
        if accepted > len(right):
            return math.inf
        needed = right[:accepted] + wrong[accepted : accepted + 1]
        return max(needed, default=0.0)

    def expected(self, newest: int) -> int:
        """How many drafts are right."""
        right = [cost == 0 for cost in self.right[newest]]
        return [*right, False].index(False)

    def possible(self, newest: int) -> int:
        """How many would be of a draft that is right where its vocabulary allows it."""
        known = [math.isfinite(cost) for cost in self.right[newest]]
        return [*known, False].index(False)

    def decided(self, newest: int, allowed: float) -> bool:
        """Whether no other number of drafts is within ``allowed``."""
        return all(
            self.cost(newest, n) > allowed
            for n in range(len(self.right[newest]) + 1)
            if n != self.expected(newest)
        )


def flips_of(side: Side, text: Text, steps: int) -> Flips:
    """How near each draft of each round is to being right or wrong."""
    rows, at = rows_of(side, text, text.aux)
    right, wrong = [], []
    for k, scores in enumerate(side.scores(rows, steps)):
        chosen = scores[at]
        first = text.prompt + 1 + k
        one, other = nearness(
            chosen, side.ids, text.tokens[first : first + len(chosen)]
        )
        right.append(one.tolist())
        wrong.append(other.tolist())
    places = [[0.0] * steps] * text.prompt  # no round starts inside the prompt
    return Flips(
        places + [list(step) for step in zip(*right, strict=True)],
        places + [list(step) for step in zip(*wrong, strict=True)],
    )


def rows_of(side: Side, text: Text, aux: torch.Tensor) -> tuple[Inputs, slice]:
    """Rows of one text, and those behind which a round may start.

    EAGLE-3 pairs a token with the feature of the one before it, blocks a token with
    its own. Rows behind the last round are only there to be shifted in. The drafts
    before another one are the target's tokens: it counts only if those were right.
    """
    behind = 1 if side.proposed is None else 0
    count = len(text.tokens)
    padded = torch.cat([aux, aux.new_zeros(count - len(aux), aux.shape[1])])
    rows = Inputs(
        text.tokens[behind:],
        padded[: count - behind],
        torch.arange(1, count + 1 - behind),
        torch.zeros(count - behind, dtype=torch.long),
    )
    return rows, slice(text.prompt - behind, text.end - 1 - behind)


def nearness(
    scores: torch.Tensor, ids: torch.Tensor, wanted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What it takes to make the best token the wanted one, and another one.

    Args:
        scores: [rows, draft vocabulary]; minus infinity where a token cannot be chosen.
        ids: Target id of each draft id.
        wanted: Target ids [rows].

    Returns:
        Two [rows], as shares of the range of the scores.
    """
    finite = scores[scores.isfinite()]
    size = (finite.max() - finite.min()).clamp(min=1e-30)
    best, second = scores.topk(2, -1).values.unbind(-1)
    is_right = ids[scores.argmax(-1)] == wanted
    others = ids[None] != wanted[:, None]
    own = scores.masked_fill(others, -math.inf).amax(-1)
    zero = torch.zeros_like(best)
    right = torch.where(is_right, zero, (best - own) / size)
    return right, torch.where(is_right, (best - second) / size, zero)


def walk(text: Text, flips: Flips) -> list[int]:
    """Newest token of each round that is expected.

    The pass over the prompt gives the first new token; the last one ends the text and
    starts no round.
    """
    places, newest = [], text.prompt
    while newest < text.end - 1:
        places.append(newest)
        newest += flips.expected(newest) + 1
    return places


def closest(histogram: Sequence[int], text: Text, flips: Flips) -> float:
    """The smallest difference that has to be overturned to end with a histogram.

    How many rounds of each kind have passed says where the next one starts, so that is
    the state of the search.

    Returns:
        0 if it is expected, infinity if no overturning leads there.
    """
    reached = {(0,) * len(histogram): 0.0}
    for _ in range(sum(histogram)):
        after: dict[tuple[int, ...], float] = {}
        for used, cost in reached.items():
            newest = text.prompt + sum((n + 1) * c for n, c in enumerate(used))
            if newest >= text.end - 1:
                continue  # the text is complete, and there are rounds left
            for n, count in enumerate(used):
                if count == histogram[n]:
                    continue
                then = (*used[:n], count + 1, *used[n + 1 :])
                total = max(cost, flips.cost(newest, n))
                after[then] = min(total, after.get(then, math.inf))
        reached = after
    new = sum((n + 1) * count for n, count in enumerate(histogram))
    if text.prompt + new < text.end - 1:
        return math.inf  # the text is not complete
    return min(reached.values(), default=math.inf)


def compare(served: Served, text: Text, flips: Flips, allowed: float) -> PromptRounds:
    """One prompt: what SGLang counted beside what is expected."""
    places = walk(text, flips)
    accepted = [flips.expected(newest) for newest in places]
    size = max(*accepted, len(served.histogram) - 1, 0) + 1
    decided = sum(flips.decided(newest, allowed) for newest in places)
    return PromptRounds(
        served=(*served.histogram, *([0] * (size - len(served.histogram)))),
        expected=tuple(accepted.count(n) for n in range(size)),
        closest=closest(served.histogram, text, flips),
        target_gap=text.gap,
        counted=text.gap <= allowed and decided >= DECIDED * len(places),
        accepting=sum(n > 0 for n in accepted),
        refusing=sum(
            n < flips.possible(at) for n, at in zip(accepted, places, strict=True)
        ),
    )


def judge(results: Sequence[PromptRounds], tolerance: Tolerance) -> tuple[Verdict, str]:
    """Verdict and reason."""
    counted = [r for r in results if r.counted]
    if 2 * len(counted) < len(results):
        gap = max(r.target_gap for r in results)
        return "not run", (
            f"{len(results) - len(counted)} of {len(results)} prompts are no evidence: "
            "SGLang's target prefers other tokens than transformers' (by up to "
            f"{gap:.1e} of the logit range), or its drafts are too close to call"
        )
    apart = [r for r in counted if not r.closest <= tolerance.max_rel]
    if apart:
        worst = max(apart, key=lambda r: r.closest)
        return "fail", (
            "SGLang accepts other drafts than training proposes on "
            f"{len(apart)} of {len(counted)} prompts: {_rounds(worst.served)} served, "
            f"{_rounds(worst.expected)} expected on one of them"
        )
    accepting = sum(r.accepting for r in counted)
    refusing = sum(r.refusing for r in counted)
    if min(accepting, refusing) < EVIDENCE:
        rounds = sum(sum(r.expected) for r in counted)
        return "not run", (
            f"the comparison would show nothing: of {rounds} rounds, all as expected, "
            f"{accepting} accept a draft and {refusing} refuse one that its vocabulary "
            f"allows; {EVIDENCE} of each are needed"
        )
    return "pass", ""


def _rounds(histogram: Sequence[int]) -> str:
    return "+".join(map(str, histogram)) + " rounds with 0, 1, ... drafts"


def acceptance(results: Sequence[PromptRounds]) -> dict[str, float]:
    """Mean tokens per round over all prompts, the bonus token counted: to be read."""

    def mean(histograms: Sequence[Sequence[int]]) -> float:
        drafts = sum(n * count for h in histograms for n, count in enumerate(h))
        return 1 + drafts / sum(map(sum, histograms))

    return {
        "training": mean([r.expected for r in results]),
        "serving": mean([r.served for r in results]),
    }
