"""Who says what the rounds should be: the training module, or SGLang's rules.

A checkpoint gives speculators' own module. An export has none beside it: there the
reference of leg *layout* stands for it, which the probe has held against the module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from spec_export.judge.block_probe import is_block, proposals
from spec_export.judge.inputs import Inputs
from spec_export.judge.mtp_probe import is_mtp
from spec_export.judge.parts import Reference, shortest_window
from spec_export.judge.probe import drafting_module, target_ids, training_logits
from spec_export.judge.reference.block import BlockReference
from spec_export.judge.reference.mtp import MtpReference

Logits = Callable[[Inputs, int], list[torch.Tensor]]


@dataclass(frozen=True)
class Side:
    """A draft that can be asked.

    Attributes:
        what: In words.
        logits: Rows and a number of steps -> per step [T, draft vocabulary].
        unranked: The same before a selector, of whose ``top_k`` best it chooses.
        top_k: Candidates of the selector; 0 without one.
        ids: Target id of each draft id, int64.
        layers: Ids of the features as speculators counts them; None: unknown.
        proposed: Tokens of a block; None for a chain, whose launch line says it.
        mtp: Whether it is an MTP head.
        window: Of its shortest attention, in positions; infinite without one.
    """

    what: str
    logits: Logits
    unranked: Logits
    top_k: int
    ids: torch.Tensor
    layers: list[int] | None
    proposed: int | None
    mtp: bool
    window: float

    def scores(self, rows: Inputs, steps: int) -> list[torch.Tensor]:
        """Logits in which a token that cannot be chosen is minus infinity."""
        out = [step.float().cpu() for step in self.logits(rows, steps)]
        if self.top_k:
            for step, before in zip(out, self.unranked(rows, steps), strict=True):
                chosen = before.float().cpu().topk(self.top_k, -1).indices
                outside = torch.ones_like(step, dtype=torch.bool)
                step.masked_fill_(outside.scatter_(1, chosen, False), -math.inf)
        return out


def of_module(module: nn.Module) -> Side:
    """speculators' own module, at the saved dtype."""
    draft = drafting_module(module)
    selector = getattr(draft, "candidate_selector", None)
    layer = draft.config.transformer_layer_config
    sliding = "sliding_attention" in (getattr(layer, "layer_types", None) or [])

    def unranked(rows: Inputs, steps: int) -> list[torch.Tensor]:
        with _held(draft, "candidate_selector", None):
            return training_logits(module, rows, steps)

    return Side(
        "speculators' module",
        lambda rows, steps: training_logits(module, rows, steps),
        unranked,
        selector.top_k if selector is not None else 0,
        target_ids(module).cpu() if not is_mtp(draft) else torch.zeros(0).long(),
        sorted(draft.target_layer_ids),
        proposals(draft) if is_block(draft) else None,
        is_mtp(draft),
        float(layer.sliding_window) if sliding and layer.sliding_window else math.inf,
    )


def of_reference(reference: Reference, layers: list[int] | None) -> Side:
    """SGLang's rules in plain torch.

    Args:
        reference: The serving side of leg *layout*.
        layers: Of the features, as the probe has them from training.
    """
    block, mtp = (isinstance(reference, c) for c in (BlockReference, MtpReference))
    top_k: int = getattr(reference.config, "top_k", 0)

    def logits(rows: Inputs, steps: int) -> list[torch.Tensor]:
        return reference.teacher_forced(
            rows.token_ids, rows.aux, rows.position_ids, rows.document_ids, steps
        )

    def unranked(rows: Inputs, steps: int) -> list[torch.Tensor]:
        assert isinstance(reference, BlockReference)  # the only one with a selector
        plain = replace(reference.config, family="dflash")
        with _held(reference, "config", plain):
            return logits(rows, steps)

    ids = torch.arange(reference.config.draft_vocab_size, device=reference.device)
    return Side(
        "SGLang's rules in plain torch, which leg layout held against training",
        logits,
        unranked,
        top_k,
        reference.to_target(ids).cpu(),
        layers,
        getattr(reference.config, "proposals", None) if block else None,
        mtp,
        shortest_window(reference),
    )


@contextmanager
def _held(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
