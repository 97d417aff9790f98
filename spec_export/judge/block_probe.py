"""The training side of block drafts: DFlash, DFlash2 and DSpark of speculators.

A block is drafted behind every row at once. Where EAGLE-3 has chained steps, a block
has proposals; the tokens before each are given, as in training.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from spec_export.judge.inputs import Inputs

_ANCHORS = 32  # blocks of one forward; its attention mask grows with their square
# Rows times proposals of a comparison: as much as three steps of EAGLE-3.
_COMPARED = 768


def is_block(draft: Any) -> bool:
    """Whether a draft of speculators proposes blocks."""
    return hasattr(draft, "_backbone_forward")


def proposals(draft: Any) -> int:
    """Tokens that a block of this draft proposes."""
    return int(draft.block_size) - (0 if draft.config.sample_from_anchor else 1)


def block_rows(draft: Any, inputs: Inputs) -> Inputs:
    """As many rows as make a comparison of blocks cost what three steps cost."""
    return inputs.first(max(16, _COMPARED // proposals(draft)))


def block_logits(
    draft: Any, inputs: Inputs, steps: int, compute: torch.dtype
) -> list[torch.Tensor]:
    """Logits of a block behind every row, as training scores them.

    Args:
        draft: speculators' module, in evaluation mode.
        inputs: The rows; each is an anchor.
        steps: At most so many of the proposals.
        compute: Dtype of the features that enter.

    Returns:
        Per proposal [T, draft vocabulary]; padding rows are zero.
    """
    first = 0 if draft.config.sample_from_anchor else 1
    steps = min(steps, proposals(draft))
    device = draft.fc.weight.device
    size, rows = int(draft.block_size), inputs.rows()
    # speculators starts no block in the last ``size`` rows, so that many are added.
    aux = F.pad(inputs.aux.to(device, compute), (0, 0, 0, size))[None]
    tokens = F.pad(inputs.token_ids.to(device), (0, size))[None]
    positions = F.pad(inputs.position_ids.to(device), (0, size))[None]
    documents = F.pad(inputs.document_ids.to(device), (0, size), value=-1)[None]
    last = torch.zeros(1, aux.shape[1], draft.hidden_size, device=device, dtype=compute)
    out: list[torch.Tensor] = []
    for anchors in rows.to(device).split(_ANCHORS):
        chosen = torch.zeros_like(tokens)
        chosen[0, anchors] = 1
        hidden, logits, *_ = draft._backbone_forward(
            aux, tokens, chosen, last, documents, positions, max_anchors=len(anchors)
        )
        blocks = (len(anchors), size)
        hidden = hidden[0].unflatten(0, blocks)
        logits = logits[0].unflatten(0, blocks)
        logits = logits + _head(draft, hidden, _before(tokens[0], anchors, size, first))
        for slot in range(steps):
            if len(out) <= slot:
                out.append(logits.new_zeros(len(inputs), logits.shape[-1]))
            out[slot][anchors] = logits[:, first + slot].detach()
    return out


def _before(
    tokens: torch.Tensor, anchors: torch.Tensor, size: int, first: int
) -> torch.Tensor:
    """The token before the one that each row of a block predicts [A, size].

    Without sampling from the anchor, row 0 is fed its own anchor, as in training.
    """
    offsets = (torch.arange(size, device=anchors.device) - first).clamp(min=0)
    return tokens[anchors[:, None] + offsets]


def _head(
    draft: Any, hidden: torch.Tensor, before: torch.Tensor
) -> torch.Tensor | float:
    """What the Markov head or the selector adds to logits [A, size, draft vocab]."""
    if getattr(draft, "markov_head", None) is not None:
        bias: torch.Tensor = draft.markov_head.block_bias(
            prev_token_ids=before, hidden_states=hidden
        )
        return bias
    selector = getattr(draft, "candidate_selector", None)
    if selector is not None:
        # Of all tokens: training scores the same product for its candidates.
        return F.linear(selector.context(hidden, before), selector.successor_codebook)
    return 0.0


def block_differences(reference: Any, draft: Any) -> list[str]:
    """What a comparison of logits would not show: how many tokens, and of which."""
    found, wanted = reference.config.proposals, proposals(draft)
    problems = []
    if found != wanted:
        problems.append(f"SGLang proposes {found} tokens per block, training {wanted}")
    selector = getattr(draft, "candidate_selector", None)
    if selector is not None and selector.top_k != reference.config.top_k:
        problems.append(
            f"the selector reranks {reference.config.top_k} candidates in SGLang, "
            f"{selector.top_k} in training"
        )
    return problems


def diagnose_block(
    module_outputs: list[tuple[str, torch.Tensor]],
    serving_outputs: list[tuple[str, torch.Tensor]],
    level: float,
) -> list[str]:
    """The first stage that differs; its inputs agree, so its own tensor is wrong.

    Args:
        module_outputs: Outputs of the training side's modules, in order.
        serving_outputs: The same of the serving side, by the same names.
        level: Largest difference allowed, as a share of the stage's range.
    """
    trained: dict[str, torch.Tensor] = {}
    for name, value in module_outputs:
        trained.setdefault(name, value)
    for name, value in serving_outputs:
        other = trained.get(name)
        if other is None:
            continue
        other = other[: len(value)]  # training adds rows behind the last document
        if other.shape != value.shape:
            return [f"{name} has {list(value.shape)}, training {list(other.shape)}"]
        apart = (other - value.to(other.device)).abs().max().item()
        size = other.abs().max().item()
        if not apart <= level * max(size, 1e-30):
            share = apart / max(size, 1e-30)
            return [
                f"the first stage that differs is {name}, by {share:.1e} of its size",
                "what it takes in agrees: its tensor or its configuration is wrong",
            ]
    return ["all stages agree up to the head; the Markov head or selector differs"]
