"""How many tokens a round would yield along recorded text.

A round is verified by the target's own greedy choice where its last hidden states are
recorded and its head is at hand, as a server would; else by the tokens of the text,
which says the same only of text that the target wrote greedily itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from spec_export.judge.inputs import Inputs, document_spans
from spec_export.judge.target import (
    TargetUnreadable,
    language_model,
    target_norm,
    target_tensors,
)
from spec_export.judge.verdict import ACCEPTANCE

# Targets whose norms multiply by one plus the weight: Gemma's do up to the third.
_ONE_PLUS = ("gemma", "qwen3_next", "qwen3_5")
_PLAIN = ("gemma3n", "gemma4")
_HEAD_ROWS = 8192  # of the target's head at a time


def acceptance_length(
    logits: Sequence[torch.Tensor],
    inputs: Inputs,
    target_ids: torch.Tensor,
    choice: torch.Tensor | None = None,
) -> float | None:
    """Mean acceptance length of greedy chains, bonus token included.

    Teacher-forced logits are enough: as long as all proposals were accepted and are
    the text's tokens, the next step was given what a free chain gives it. Where the
    target would accept a token that is not the text's, how the round goes on is not
    known: it counts up to there (a product-limit estimate, as for patients who leave
    a study).

    Args:
        logits: Per step [T, draft vocabulary].
        inputs: Rows, of which the recorded ones are looked at.
        target_ids: Target id of each draft id, int64 [draft vocabulary].
        choice: The target's choice behind each row's token, int64 [T]; None: the
            text's own next token.

    Returns:
        The mean over the rounds that start at a scored row and whose chain lies in
        the row's document; None without such a row.
    """
    steps = len(logits)
    at = _starts(inputs, steps)
    if at is None:
        return None
    alive = torch.ones(len(at), dtype=torch.bool)
    reached, total = 1.0, 1.0
    for step, values in enumerate(logits):
        if not bool(alive.any()):
            break
        best = target_ids.cpu()[values[at.to(values.device)].argmax(-1).cpu()]
        text = inputs.token_ids[at + step + 1]
        wanted = text if choice is None else choice[at + step]
        accepted = alive & (best == wanted)
        reached *= int(accepted.sum()) / int(alive.sum())
        total += reached
        alive = accepted & (wanted == text)
    return total


def _starts(inputs: Inputs, steps: int) -> torch.Tensor | None:
    """Recorded and scored rows with a whole chain before their document's end."""
    rows = [
        torch.arange(start, end - steps)
        for start, end in document_spans(inputs.document_ids)
        if start < inputs.recorded and end - start > steps
    ]
    at = torch.cat(rows) if rows else torch.zeros(0, dtype=torch.long)
    if inputs.scored is not None:
        at = at[inputs.scored[at]]
    return at if len(at) else None


def target_choice(
    inputs: Inputs,
    target: Path | None,
    config: Mapping[str, Any] | None,
    device: torch.device,
) -> torch.Tensor | None:
    """The token that the target itself would take behind each recorded row's.

    Args:
        inputs: The rows.
        target: Folder of the target; its norm and head are read.
        config: Its ``config.json``.
        device: Where to compute, in float32.

    Returns:
        int64 [T], -1 for rows of a seed; None where something for it is missing.
    """
    if inputs.last is None or target is None or config is None:
        return None
    text = language_model(config)
    try:
        norm, (_, head) = target_norm(target), target_tensors(target)
    except TargetUnreadable:
        return None
    eps = text.get("rms_norm_eps")
    width = inputs.last.shape[-1]
    if norm is None or eps is None or (len(norm), head.shape[1]) != (width, width):
        return None
    weight = norm.to(device).float()
    kind = str(text.get("model_type", ""))
    if kind.startswith(_ONE_PLUS) and not kind.startswith(_PLAIN):
        weight = 1 + weight
    x = inputs.last[: inputs.recorded].to(device).float()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight
    most = torch.full((len(x),), -torch.inf, device=device)
    best = torch.zeros(len(x), dtype=torch.long, device=device)
    for start in range(0, len(head), _HEAD_ROWS):
        part = head[start : start + _HEAD_ROWS].to(device).float()
        values, ids = (x @ part.T).max(-1)
        best = torch.where(values > most, ids + start, best)
        most = torch.maximum(values, most)
    choice = torch.full((len(inputs),), -1)
    choice[: inputs.recorded] = best.cpu()
    return choice


def both_sides(
    training: Sequence[torch.Tensor],
    serving: Sequence[torch.Tensor],
    inputs: Inputs,
    target_ids: torch.Tensor,
    choice: torch.Tensor | None = None,
) -> tuple[dict[str, float] | None, tuple[str, ...]]:
    """The mean of each side, and how it was counted.

    Args:
        training: Logits of the training side, per step [T, draft vocabulary].
        serving: Those of the serving side.
        inputs: The rows; tokens from a seed are nobody's text.
        target_ids: Target id of each draft id, int64 [draft vocabulary].
        choice: From ``target_choice``.

    Returns:
        ``training_vs_target_greedy`` and ``serving_vs_target_greedy``, or the same
        with ``vs_text``; None without a round that could be looked at. A note.
    """
    found = {
        "training": acceptance_length(training, inputs, target_ids, choice),
        "serving": acceptance_length(serving, inputs, target_ids, choice),
    }
    at = _starts(inputs, len(training))
    if at is None or None in found.values():
        return None, ()
    basis = "text" if choice is None else "target_greedy"
    means = {f"{side}_vs_{basis}": mean for side, mean in found.items() if mean}
    told = f"{len(at)} rounds of {len(training)} along the text of {inputs.batch}"
    by = "that text itself: the target's choice is not at hand"
    if choice is not None:
        same = (choice[at] == inputs.token_ids[at + 1]).double().mean().item()
        by = f"the target's greedy choice (the text's own token in {same:.0%} of them)"
    return means, (f"{ACCEPTANCE}{told}, verified by {by}",)
