"""How many tokens a round would yield, where the rows carry the target's tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spec_export.judge.inputs import Inputs, document_spans


def acceptance_length(
    logits: Sequence[torch.Tensor], inputs: Inputs, target_ids: torch.Tensor
) -> float | None:
    """Mean acceptance length of greedy chains, bonus token included.

    Teacher-forced logits are enough: as long as all proposals were the target's
    tokens, the next step was given what a free chain gives it, and after the first
    other one nothing counts.

    Args:
        logits: Per step [T, draft vocabulary].
        inputs: Recorded rows: each document is a text of the target's.
        target_ids: Target id of each draft id, int64 [draft vocabulary].

    Returns:
        The mean over the rows whose whole chain lies in their document; None without
        such a row.
    """
    steps = len(logits)
    rows = [
        torch.arange(start, end - steps)
        for start, end in document_spans(inputs.document_ids)
        if end - start > steps
    ]
    if not rows:
        return None
    at = torch.cat(rows)
    alive = torch.ones(len(at), dtype=torch.bool)
    total = torch.ones(len(at))
    for step, values in enumerate(logits):
        best = values[at.to(values.device)].argmax(-1).cpu()
        alive &= target_ids.cpu()[best] == inputs.token_ids[at + step + 1]
        total += alive
    return float(total.mean())


def both_sides(
    training: Sequence[torch.Tensor],
    serving: Sequence[torch.Tensor],
    inputs: Inputs,
    target_ids: torch.Tensor,
) -> dict[str, float] | None:
    """The mean of each side, of recorded rows: tokens from a seed are nobody's."""
    if inputs.seed is not None:
        return None
    found = {
        "training": acceptance_length(training, inputs, target_ids),
        "serving": acceptance_length(serving, inputs, target_ids),
    }
    return {side: mean for side, mean in found.items() if mean is not None} or None
