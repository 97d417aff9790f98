"""The training side of block drafts: DFlash, DFlash2 and DSpark of speculators.

A block is drafted behind every row at once. Where EAGLE-3 has chained steps, a block
has proposals; the tokens before each are given, as in training.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from spec_export.judge.inputs import Inputs
from spec_export.judge.seeded import uniform

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


def reranked(draft: Any) -> int:
    """Candidates that the selector of a draft chooses from; 0 without one."""
    selector = getattr(draft, "candidate_selector", None)
    return int(selector.top_k) if selector is not None else 0


def size_problems(reference: Any, wanted: int, top_k: int | None) -> list[str]:
    """Whether SGLang proposes and reranks as many tokens as training.

    Args:
        reference: The serving side of a block draft.
        wanted: Tokens that a block proposes in training.
        top_k: Candidates of training's selector, 0 without one; None: not known.
    """
    found, problems = reference.config, []
    if found.proposals != wanted:
        problems.append(
            f"SGLang proposes {found.proposals} tokens per block, training {wanted}"
        )
    if top_k is not None and found.top_k != top_k:
        problems.append(
            f"the selector reranks {found.top_k} candidates in SGLang, "
            f"{top_k} in training"
        )
    return problems


def block_differences(reference: Any, draft: Any) -> list[str]:
    """What a comparison of logits would not show: how many tokens, and of which."""
    problems = size_problems(reference, proposals(draft), reranked(draft))
    problems += _table_problems(reference, draft)
    return problems + _confidence(reference, draft)


def _table_problems(reference: Any, draft: Any) -> list[str]:
    """Rows of tokens that no compared row had before it.

    The table of preceding tokens is held against training's through the other table,
    summed with random weights: a rank more or another order of ranks is no difference.
    """
    names, held = reference.tables, dict(draft.named_parameters())
    if not names or not set(names) <= set(held):
        return []
    trained = [held[name].detach().cpu() for name in names]
    served = [reference.weights[name].cpu() for name in names]
    if reference.hot_token_id is not None:
        served[1] = served[1][reference.hot_token_id.cpu()]
    if [len(table) for table in served] != [len(table) for table in trained]:
        return []  # logits of so many tokens cannot be compared, and say so
    weights = uniform(len(trained[1]), 5).double() - 0.5

    def through(tables: list[torch.Tensor], weights: torch.Tensor) -> torch.Tensor:
        return tables[0].double() @ (tables[1].double().T @ weights)

    apart = (through(trained, weights) - through(served, weights)).abs()
    size = through([table.abs() for table in trained], weights.abs())
    wrong = (apart > _unit(reference) * size).nonzero().reshape(-1)
    if not len(wrong):
        return []
    return [f"{names[0]}: {len(wrong)} rows are not training's, the first {wrong[0]}"]


def _unit(reference: Any) -> float:
    """Share of a product of two saved values by which rounding may move it."""
    return float(torch.finfo(getattr(torch, reference.config.dtype)).eps)


def _confidence(reference: Any, draft: Any) -> list[str]:
    """The confidence head, which some modes of SGLang cut rounds by.

    No logit shows it, and the default mode does not load it.
    """
    head = getattr(draft, "confidence_head", None)
    if head is None:
        return []
    name = "confidence_head.proj"
    count, hidden = 64, draft.hidden_size
    states = uniform(count * hidden, 6).view(count, hidden) - 0.5
    before = torch.arange(count) * len(draft.embed_tokens.weight) // count
    weight = head.proj.weight
    features = states.to(weight.device, weight.dtype)
    if draft.config.confidence_head_with_markov:
        latent = draft.markov_head.prev_embeddings(before.to(weight.device))
        features = torch.cat([features, latent.to(features.dtype)], -1)
    one = head(features).detach().double().cpu()
    try:
        other = reference.confidence(states, before).double().cpu()
    except (KeyError, RuntimeError) as problem:
        return [f"{name} does not fit SGLang's confidence head: {problem}"]
    sizes = F.linear(features.abs(), weight.abs(), head.proj.bias.abs())[:, 0]
    allowed = _unit(reference) + 8 * torch.finfo(reference.dtype).eps
    if bool(((one - other).abs() <= allowed * sizes.detach().double().cpu()).all()):
        return []
    return [f"{name} gives another confidence than in training"]


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
