"""``Qwen3NextForCausalLMMTP`` and ``Qwen3_5ForCausalLMMTP`` in plain torch.

Written from ``models/qwen3_next_mtp.py``, ``models/qwen3_5_mtp.py`` and the attention
and experts of ``models/qwen3_next.py`` and ``qwen2_moe.py`` of SGLang 0.5.23. The
config.json is the target's own. Stages have the training class's module names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open

from spec_export.judge.inputs import document_spans
from spec_export.judge.reference.loading import (
    LoadReport,
    Parameter,
    initial_value,
    weight_files,
)
from spec_export.judge.reference.rope import Rope
from spec_export.judge.reference.serving_config import (
    Release,
    ServingError,
    dtype_name,
    parse_release,
)
from spec_export.judge.target import language_model

Trace = Callable[[int, str, torch.Tensor], None]
_NEXT = "Qwen3NextForCausalLM"
_CHECKED_ROPE = ("llama3", "longrope", "yarn")
_TEXT_ONLY = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")


@dataclass(frozen=True)
class MtpConfig:
    """The values that decide shapes and forward.

    Attributes:
        experts: Number of routed experts; 0 for a dense MLP.
        chosen: Experts of a token.
        width: Of a routed expert, or of the dense MLP.
        shared: Width of the shared expert.
        renormalize: Whether the chosen experts' weights sum to one.
        fused_experts: Whether one tensor may hold all experts.
        tied: The head is the embedding, whatever the target's head is.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    eps: float
    experts: int
    chosen: int
    width: int
    shared: int
    renormalize: bool
    fused_experts: bool
    rope: dict[str, Any]
    rotary_dim: int
    max_position: int
    dtype: str
    draft_vocab_size: int
    tied: bool
    num_layers: int = 1
    neox: bool = True


def read_mtp_config(raw: Mapping[str, Any], release: str) -> MtpConfig:
    """Resolve the target's ``config.json`` as the MTP class does.

    Raises:
        ServingError: a size is missing, or SGLang raises.
    """
    number, own = parse_release(release), language_model(raw)
    text = {**raw, **own}
    is_next = raw["architectures"][0] == _NEXT
    if number < ((0, 5, 2, 0) if is_next else (0, 5, 9, 0)):
        raise ServingError(f"SGLang {release} has no MTP class for this target")
    if raw["architectures"][0] in _TEXT_ONLY and number < (0, 5, 17, 0):
        raise ServingError(f"SGLang {release} does not know this target")
    kind = "qwen3_next" if is_next else "qwen3_5"
    for named in (raw.get("model_type"), own.get("model_type", kind)):
        if not str(named).startswith(kind):
            raise ServingError(f"model_type {named!r} of an MTP head")
    try:
        hidden, heads = int(text["hidden_size"]), int(text["num_attention_heads"])
        head = int(text.get("head_dim", 256) or hidden // heads)
        experts = int(text.get("num_experts") or 0)
        width = text["moe_intermediate_size" if experts else "intermediate_size"]
        vocab, max_position = text["vocab_size"], text["max_position_embeddings"]
    except KeyError as problem:
        raise ServingError(f"config.json lacks {problem}") from problem
    chosen = int(text.get("num_experts_per_tok") or 0)
    if experts and not 0 < chosen <= experts:
        raise ServingError(f"{chosen} experts of a token, {experts} in all")
    if text.get("hidden_act", "silu") != "silu":
        raise ServingError(f"hidden_act {text['hidden_act']!r}")
    partial = text.get("partial_rotary_factor")
    return MtpConfig(
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=int(text.get("num_key_value_heads") or heads),
        head_dim=head,
        vocab_size=int(vocab),
        eps=float(text.get("rms_norm_eps", 1e-6)),
        experts=experts,
        chosen=chosen,
        width=int(width),
        shared=int(text.get("shared_expert_intermediate_size") or 0),
        renormalize=bool(text.get("norm_topk_prob", True)),
        fused_experts=not is_next,
        rope=_rope(text, is_next, number),
        rotary_dim=int(head * (0.25 if partial is None else partial)),
        max_position=int(max_position),
        dtype=dtype_name(text, number),
        draft_vocab_size=int(vocab),
        tied=not is_next and bool(own.get("tie_word_embeddings")),
    )


def _rope(text: Mapping[str, Any], is_next: bool, number: Release) -> dict[str, Any]:
    """What SGLang's own configuration classes, not transformers', read of RoPE.

    ``Qwen3NextConfig`` knows the older spelling only; that of Qwen3.5 lets
    ``rope_parameters`` win. Neither looks for ``partial_rotary_factor`` in there.

    Raises:
        ServingError: of Qwen3-Next transformers checks the newer spelling all the
            same, since the 5.6 of SGLang 0.5.11, before the sizes for it are set.
    """
    found = dict(text.get("rope_scaling") or {})
    if is_next:
        newer = text.get("rope_parameters")
        kind = newer.get("rope_type") if isinstance(newer, Mapping) else None
        if kind in _CHECKED_ROPE and number >= (0, 5, 11, 0):
            raise ServingError(f"rope_parameters of the type {kind}: AttributeError")
        found.pop("rope_theta", None)
    else:
        found = dict(text.get("rope_parameters") or found)
    rope = {key: value for key, value in found.items() if not key.startswith("mrope")}
    theta = text.get("rope_theta")
    rope.setdefault("rope_theta", 10000.0 if theta is None else theta)
    rope.setdefault("rope_type", rope.get("type", "default"))
    return rope


def mtp_parameters(config: MtpConfig) -> dict[str, Parameter]:
    """Parameters by the checkpoint names that fill them; norms are 1 + weight."""
    hidden, head = config.hidden_size, config.head_dim
    q, kv = config.num_heads * head, config.num_kv_heads * head
    layer = "mtp.layers.0"
    out = {
        "mtp.fc.weight": Parameter((hidden, 2 * hidden)),
        f"{layer}.self_attn.q_proj.weight": Parameter((2 * q, hidden)),
        f"{layer}.self_attn.k_proj.weight": Parameter((kv, hidden)),
        f"{layer}.self_attn.v_proj.weight": Parameter((kv, hidden)),
        f"{layer}.self_attn.o_proj.weight": Parameter((hidden, q)),
    }
    for name in (
        "mtp.pre_fc_norm_hidden",
        "mtp.pre_fc_norm_embedding",
        "mtp.norm",
        f"{layer}.input_layernorm",
        f"{layer}.post_attention_layernorm",
    ):
        out[f"{name}.weight"] = Parameter((hidden,), "zeros")
    for part in "qk":
        out[f"{layer}.self_attn.{part}_norm.weight"] = Parameter((head,), "zeros")

    def mlp(name: str, width: int) -> dict[str, Parameter]:
        return {
            f"{name}.gate_proj.weight": Parameter((width, hidden)),
            f"{name}.up_proj.weight": Parameter((width, hidden)),
            f"{name}.down_proj.weight": Parameter((hidden, width)),
        }

    if not config.experts:
        return out | mlp(f"{layer}.mlp", config.width)
    out[f"{layer}.mlp.gate.weight"] = Parameter((config.experts, hidden))
    out[f"{layer}.mlp.shared_expert_gate.weight"] = Parameter((1, hidden))
    out |= mlp(f"{layer}.mlp.shared_expert", config.shared)
    for expert in range(config.experts):
        out |= mlp(f"{layer}.mlp.experts.{expert}", config.width)
    return out


def load_mtp_weights(
    folder: Path, config: MtpConfig, dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], LoadReport]:
    """Load ``mtp.*`` tensors; all others belong to the target and are left out.

    Raises:
        ServingError: a shape that does not fit, or a name that Qwen3-Next refuses.
    """
    parameters = mtp_parameters(config)
    values: dict[str, torch.Tensor] = {}
    report = LoadReport()
    for source, tensor in _mtp_tensors(folder):
        pieces = {source: tensor}
        if config.fused_experts and source.endswith("experts.gate_up_proj"):
            name = source.removesuffix(".gate_up_proj")
            pieces = {}
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                pieces[f"{name}.{expert}.gate_proj.weight"] = gate
                pieces[f"{name}.{expert}.up_proj.weight"] = up
        elif config.fused_experts and source.endswith("experts.down_proj"):
            name = source.removesuffix(".down_proj")
            pieces = {f"{name}.{e}.down_proj.weight": t for e, t in enumerate(tensor)}
        for name, piece in pieces.items():
            if name not in parameters:
                if not config.fused_experts:
                    raise ServingError(f"KeyError: {name}")
                report.dropped.append(source)
                continue
            wanted = parameters[name].shape
            if tuple(piece.shape) != wanted:
                found = list(piece.shape)
                raise ServingError(f"{source} is {found}, {name} is {list(wanted)}")
            if name in values:
                report.doubled.append(name)
            values[name], report.filled[name] = piece.to(dtype), source
    for seed, (name, parameter) in enumerate(parameters.items()):
        if name not in values:
            # A norm that is never set computes 1 + 0.
            kept = "ones" if parameter.initial == "zeros" else parameter.initial
            report.missing[name] = kept
            values[name] = initial_value(
                parameter.shape, parameter.initial, seed, dtype
            )
    return values, report


def _mtp_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that the class reads; a whole target may be beside them."""
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118 - safe_open is no mapping
                if "mtp" in name:
                    yield name, handle.get_tensor(name)


class MtpReference:
    """SGLang's MTP classes; attributes as in ``Eagle3Reference``."""

    hot_token_id: torch.Tensor | None = None

    def __init__(
        self,
        folder: Path,
        raw: Mapping[str, Any],
        *,
        embed: torch.Tensor | None,
        head: torch.Tensor | None,
        release: str,
        dtype: torch.dtype,
        device: torch.device,
        window: int | None,
    ) -> None:
        self.config = read_mtp_config(raw, release)
        self.rope = Rope(self.config)
        self.dtype, self.device = dtype, device
        held = getattr(torch, self.config.dtype, torch.float32)
        values, self.report = load_mtp_weights(folder, self.config, held)
        head = embed if self.config.tied else head
        for name, shared in (("embed_tokens.weight", embed), ("lm_head.weight", head)):
            if shared is None:
                raise ServingError(f"the target's {name} is not at hand")
            values[name] = shared.to(held)
        self.weights = {name: value.to(device) for name, value in values.items()}
        # Both are the target's, whatever size the file says; the logits are cropped.
        size = min(self.config.vocab_size, len(values["lm_head.weight"]))
        self.config = replace(self.config, vocab_size=size, draft_vocab_size=size)

    def _weight(self, name: str) -> torch.Tensor:
        return self.weights[f"{name}.weight"].to(self.dtype)

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self._weight(name))

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.config.eps)
        return (y * (1 + self._weight(name).float())).to(self.dtype)

    def _attention(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Gated attention of all rows of one document, causal."""
        name, head = "mtp.layers.0.self_attn", self.config.head_dim
        q, gate = (
            self._linear(x, f"{name}.q_proj").unflatten(-1, (-1, 2 * head)).chunk(2, -1)
        )
        k = self._linear(x, f"{name}.k_proj").unflatten(-1, (-1, head))
        v = self._linear(x, f"{name}.v_proj").unflatten(-1, (-1, head))
        table = self.rope.table(positions)
        q = self.rope.apply(self._norm(q, f"{name}.q_norm"), table)
        k = self.rope.apply(self._norm(k, f"{name}.k_norm"), table)
        group = q.shape[1] // k.shape[1]
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1),
            k.repeat_interleave(group, 1).transpose(0, 1),
            v.repeat_interleave(group, 1).transpose(0, 1),
            is_causal=True,
        ).transpose(0, 1)
        return self._linear((out * torch.sigmoid(gate)).flatten(1), f"{name}.o_proj")

    def _mlp(self, x: torch.Tensor, name: str) -> torch.Tensor:
        gate = F.silu(self._linear(x, f"{name}.gate_proj"))
        return self._linear(
            gate * self._linear(x, f"{name}.up_proj"), f"{name}.down_proj"
        )

    def _experts(self, x: torch.Tensor) -> torch.Tensor:
        name, config = "mtp.layers.0.mlp", self.config
        scores = self._linear(x, f"{name}.gate").float().softmax(-1)
        weights, chosen = scores.topk(config.chosen, -1)
        if config.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        out = torch.sigmoid(self._linear(x, f"{name}.shared_expert_gate"))
        out = out * self._mlp(x, f"{name}.shared_expert")
        for expert in chosen.unique().tolist():
            part = (weights * (chosen == expert)).sum(-1, keepdim=True).to(self.dtype)
            out = out + part * self._mlp(x, f"{name}.experts.{expert}")
        return out

    def step(
        self,
        tokens: torch.Tensor,
        state: torch.Tensor,
        positions: torch.Tensor,
        step: int,
        trace: Trace,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One step over the rows of a document: logits and the next state."""
        layer, trained = "mtp.layers.0", "mtp_layers.0"
        embeds = F.embedding(tokens, self.weights["embed_tokens.weight"])
        embeds = self._norm(embeds.to(self.dtype), "mtp.pre_fc_norm_embedding")
        trace(step, f"{trained}.token_layernorm", embeds)
        hidden = self._norm(state, "mtp.pre_fc_norm_hidden")
        trace(step, f"{trained}.hidden_layernorm", hidden)
        x = self._linear(torch.cat([embeds, hidden], -1), "mtp.fc")
        trace(step, f"{trained}.input_proj", x)
        x = x + self._attention(self._norm(x, f"{layer}.input_layernorm"), positions)
        y = self._norm(x, f"{layer}.post_attention_layernorm")
        trace(step, f"{trained}.post_attention_layernorm", y)
        x = x + (
            self._experts(y) if self.config.experts else self._mlp(y, f"{layer}.mlp")
        )
        x = self._norm(x, "mtp.norm")
        trace(step, f"{trained}.final_layernorm", x)
        return self._linear(x, "lm_head")[:, : self.config.vocab_size], x

    @torch.no_grad()
    def teacher_forced(
        self,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        position_ids: torch.Tensor,
        document_ids: torch.Tensor,
        steps: int,
        trace: Trace | None = None,
    ) -> list[torch.Tensor]:
        """Chained steps over all rows, tokens given; arguments as for EAGLE-3.

        Every step's rows see that step's rows of their document, as in training; a
        server's later steps see the first step's rows of the prefix.
        """
        shape = (len(token_ids), self.config.vocab_size)
        out = [
            torch.zeros(shape, dtype=self.dtype, device=self.device)
            for _ in range(steps)
        ]
        tokens = F.pad(token_ids, (0, steps)).to(self.device)
        for start, end in document_spans(document_ids):
            state = features[start:end].to(self.device, self.dtype)
            positions = position_ids[start:end].to(self.device) - 1
            for step in range(steps):
                rows = tokens[start + step : end + step]
                logits, state = self.step(
                    rows, state, positions, step, trace or _no_trace
                )
                out[step][start:end] = logits
        return out

    def to_target(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Draft ids are target ids."""
        return draft_ids

    def window_of(self, layer: int) -> int | None:
        """No window."""
        return None


def _no_trace(step: int, stage: str, value: torch.Tensor) -> None:
    return None
