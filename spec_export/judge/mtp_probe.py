"""The training side of MTP drafts: speculators' ``MTPDraftModel``.

Step s scores row t from the state of step s - 1 and the token that stands s + 1 behind
it; each step's rows see that step's rows of their document, as in training.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from spec_export.judge.compare import compare_logits
from spec_export.judge.inputs import Inputs, document_spans
from spec_export.judge.target import target_norm


def is_mtp(draft: Any) -> bool:
    """Whether a draft of speculators is an MTP head."""
    return hasattr(draft, "mtp_layers")


def main_weight(draft: Any) -> torch.Tensor:
    """A weight that every draft of a family has: it tells dtype and device."""
    weight: torch.Tensor = (
        draft.mtp_layers[0].input_proj.weight if is_mtp(draft) else draft.fc.weight
    )
    return weight


def routes(draft: Any) -> bool:
    """Whether a draft sends each token to experts that it chooses."""
    return is_mtp(draft) and hasattr(draft.mtp_layers[0].mlp, "experts")


@contextmanager
def _evaluating(draft: Any, device: torch.device) -> Iterator[None]:
    modes = {m: m.training for m in draft.modules()}
    cuda = [device] if device.type == "cuda" else []
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=cuda))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            draft.eval()
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode


def first_step_note(draft: Any, inputs: Inputs, target: Path | None) -> tuple[str, ...]:
    """What it costs an MTP head that SGLang norms the state of the first step.

    speculators trains it on the target's last state before the final norm; SGLang
    hands the state over after it. Nothing for other families, or without the norm.
    """
    norm = None if target is None or not is_mtp(draft) else target_norm(target)
    if norm is None:
        return ()
    eps = draft.config.transformer_layer_config.rms_norm_eps
    scale = torch.rsqrt(inputs.aux.pow(2).mean(-1, keepdim=True) + eps)
    served = replace(inputs, aux=inputs.aux * scale * (1 + norm.float()), seed=None)
    dtype = main_weight(draft).dtype
    (metrics,) = compare_logits(
        mtp_logits(draft, inputs, 1, dtype),
        mtp_logits(draft, served, 1, dtype),
        inputs.rows(),
    )
    size = f"{metrics.max_rel:.2g} of their range, KL {metrics.kl_mean:.2g} nats"
    text = f"normed as in SGLang, the first step's logits differ by {size}"
    return (f"mtp-first-step: {text}, {metrics.top1:.0%} of the best tokens agree",)


def mtp_logits(
    draft: Any, inputs: Inputs, steps: int, compute: torch.dtype
) -> list[torch.Tensor]:
    """Logits of each step, the tokens given.

    speculators scores a fixed number of steps and leaves as many rows at the end of a
    document without a score; so rows are added, which no earlier row sees.

    Args:
        draft: speculators' module.
        inputs: The rows: the token of row t's first step with its feature.
        steps: At most so many of the steps.
        compute: Dtype of the features that enter.

    Returns:
        Per step [T, vocabulary]; padding rows are zero.
    """
    weight = main_weight(draft)
    device, count = weight.device, int(draft.config.num_speculative_steps)
    steps = min(steps, count)
    following = F.pad(inputs.token_ids, (0, count + 1))
    out: list[torch.Tensor] = []
    with _evaluating(draft, device):
        for start, end in document_spans(inputs.document_ids):
            rows = end - start
            features = inputs.aux[start:end].to(device, compute)
            # speculators looks tokens up one place further than their feature.
            tokens = F.pad(following[start : end + count], (1, 0))[None].to(device)
            scored, *_ = draft(
                tokens,
                F.pad(features, (0, 0, 0, count + 1))[None],
                position_ids=torch.arange(rows + count + 1, device=device)[None],
            )
            for step in range(steps):
                if len(out) <= step:
                    shape = (len(inputs), scored[step].shape[-1])
                    out.append(scored[step].new_zeros(shape))
                out[step][start:end] = scored[step][0, :rows].detach()
    return out
