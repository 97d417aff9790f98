"""Run SGLang's MTP class over a tiny export by hand and compare it with the judge's.

Runs in SGLang's Python, for one release, like ``release_check.py``: no server, a plain
attention kernel, the class's own forward over a prefix and then token by token; once
more with two norms swapped, which has to show. Prints one JSON object.

    python mtp_check.py SERVER VERIFIER DRAFT

SERVER is a target that SGLang serves on a CPU; only the runtime is started with it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from runtime import PlainAttention, load_draft, plain_args, print_answer, start
from safetensors.torch import load_file

from spec_export.judge.reference.mtp import MtpReference

ROWS, STEPS = 24, 4
KERNELS = torch.library.Library("sgl_kernel", "FRAGMENT")


def gate(x: torch.Tensor, by: torch.Tensor) -> None:
    """Stands in for a compiled kernel: the attention's output gate."""
    x *= torch.sigmoid(by.reshape(x.shape))


def norm_heads(
    q_gate: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    width: int,
    heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Stands in for a compiled kernel: head norms, the gate split off the query."""

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), (width,), 1 + weight.float(), eps).to(x.dtype)

    q, by = q_gate.unflatten(-1, (heads, 2 * width)).chunk(2, -1)
    return (
        norm(q, q_weight),
        norm(k.unflatten(-1, (-1, width)), k_weight),
        by.contiguous(),
    )


# Without these names Qwen3.5's module is not imported; its MTP layer uses two of them.
KERNELS.define("fused_sigmoid_mul_cpu(Tensor(a!) x, Tensor gate) -> ()")
KERNELS.define(
    "fused_qk_gemma_rmsnorm_with_gate_cpu(Tensor q_gate, Tensor k, Tensor q_weight, "
    "Tensor k_weight, float eps, int width, int heads) -> (Tensor, Tensor, Tensor)"
)
KERNELS.define("fused_qk_gemma_rmsnorm_cpu() -> ()")
KERNELS.define("fused_qkvzba_split_reshape_cat_contiguous_cpu() -> ()")
KERNELS.impl("fused_sigmoid_mul_cpu", gate, "CompositeExplicitAutograd")
KERNELS.impl(
    "fused_qk_gemma_rmsnorm_with_gate_cpu", norm_heads, "CompositeExplicitAutograd"
)


class Batch(SimpleNamespace):
    """One request: no parallelism, no cache, nothing that a kernel would need."""

    def contains_mm_inputs(self) -> bool:
        return False

    def __getattr__(self, name: str) -> None:
        return None


def add_gated(
    hidden: torch.Tensor, gate: torch.Tensor, shared: torch.Tensor, out: torch.Tensor
) -> None:
    """Stands in for the one Triton kernel of the layer, which needs a GPU."""
    out += torch.sigmoid(hidden @ gate)[:, None] * shared


class Hidden(torch.nn.Module):
    """Stands in for the logits of a batch: what they are computed from."""

    def forward(
        self, input_ids: torch.Tensor, hidden: Any, *_rest: object
    ) -> torch.Tensor:
        return hidden[0] if isinstance(hidden, tuple) else hidden


def without_kernels(model: Any) -> None:
    """Put the stand-ins into the class; the head is the target's."""
    from sglang.srt.models import qwen2_moe

    qwen2_moe.fused_gate_sigmoid_mul_add = add_gated
    model.logits_processor = Hidden()
    for layer in model.model.layers:
        layer.attn = PlainAttention(layer.attn)


@torch.no_grad()
def difference(model: Any, target: Path, draft: Path) -> float:
    """Largest difference of the class's logits and the judge's, over their range."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    held = load_file(target / "model.safetensors")
    embed = next(value for name, value in held.items() if "embed_tokens" in name)
    head = held["lm_head.weight"]
    reference = MtpReference(
        draft,
        json.loads((draft / "config.json").read_text()),
        embed=embed,
        head=head,
        release="0.5.23",
        dtype=torch.float32,
        device=torch.device("cpu"),
        window=None,
    )
    model.model.embed_tokens.weight.data = embed.float()
    for layer in model.model.layers:
        layer.attn.keys = layer.attn.values = torch.empty(0)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, len(embed), (ROWS,), generator=generator)
    state = torch.randn(ROWS, embed.shape[1], generator=generator)
    positions, documents = torch.arange(ROWS), torch.zeros(ROWS, dtype=torch.long)
    (wanted,) = reference.teacher_forced(tokens, state, positions + 1, documents, 1)
    found = []
    for rows in (slice(0, ROWS - STEPS), *range(ROWS - STEPS, ROWS)):
        rows = rows if isinstance(rows, slice) else slice(rows, rows + 1)
        batch = Batch(
            forward_mode=ForwardMode.EXTEND if not found else ForwardMode.DECODE,
            spec_info=SimpleNamespace(hidden_states=state[rows]),
        )
        hidden = model(tokens[rows], positions[rows], batch)
        found.append(F.linear(hidden, head.float()))
    gap = (torch.cat(found) - wanted).abs().max() / (wanted.max() - wanted.min())
    return float(gap)


def main(server: str, verifier: str, draft: str) -> dict[str, Any]:
    args = plain_args(server)
    start(args)
    model = load_draft(args, draft)
    answer = {"class": type(model).__name__}
    without_kernels(model)
    answer["difference"] = difference(model, Path(verifier), Path(draft))
    hidden, embedding = model.pre_fc_norm_hidden, model.pre_fc_norm_embedding
    model.pre_fc_norm_hidden, model.pre_fc_norm_embedding = embedding, hidden
    answer["swapped"] = difference(model, Path(verifier), Path(draft))
    return answer


if __name__ == "__main__":
    print_answer(lambda: main(*sys.argv[1:]))
