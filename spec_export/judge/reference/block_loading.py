"""SGLang's loading rules for DFlash, DFlash2 and DSpark drafts, in plain torch.

As ``DFlashDraftModel.load_weights`` and ``DSparkDraftMixin.load_weights`` do it: what
fits no parameter is dropped without a word (a Markov tensor raises), what no tensor
sets keeps its initial value.
"""

from __future__ import annotations

from pathlib import Path

import torch

from spec_export.judge.reference.block_config import BlockConfig
from spec_export.judge.reference.loading import (
    STACKED,
    LoadReport,
    Parameter,
    initial_value,
    part_name,
    read_tensors,
)
from spec_export.judge.reference.serving_config import ServingError

_ALIASES = {
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
}
_SKIPPED_BY_DSPARK = ("lm_head.", "rotary_emb.", "embed_tokens.")


def block_parameters(config: BlockConfig) -> dict[str, Parameter]:
    """Name, shape and initial value of each parameter that the forward reads."""
    hidden, inter, head = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * head, config.num_kv_heads * head
    out = {
        "fc.weight": Parameter((hidden, config.num_features * hidden)),
        "hidden_norm.weight": Parameter((hidden,), "ones"),
        "norm.weight": Parameter((hidden,), "ones"),
    }
    for i in range(config.num_layers):
        layer = f"layers.{i}"
        qkv = (("q", q), ("k", kv), ("v", kv))
        out[f"{layer}.input_layernorm.weight"] = Parameter((hidden,), "ones")
        out[f"{layer}.post_attention_layernorm.weight"] = Parameter((hidden,), "ones")
        out[f"{layer}.self_attn.qkv_proj.weight"] = Parameter(
            (q + 2 * kv, hidden), shards=qkv
        )
        out[f"{layer}.self_attn.o_proj.weight"] = Parameter((hidden, q))
        out[f"{layer}.self_attn.q_norm.weight"] = Parameter((head,), "ones")
        out[f"{layer}.self_attn.k_norm.weight"] = Parameter((head,), "ones")
        out[f"{layer}.mlp.gate_up_proj.weight"] = Parameter(
            (2 * inter, hidden), shards=(("gate", inter), ("up", inter))
        )
        out[f"{layer}.mlp.down_proj.weight"] = Parameter((hidden, inter))
        if config.attention_bias:
            out[f"{layer}.self_attn.qkv_proj.bias"] = Parameter(
                (q + 2 * kv,), shards=qkv
            )
            out[f"{layer}.self_attn.o_proj.bias"] = Parameter((hidden,))
        for conv in ("attention_conv", "mlp_conv") if config.taps else ():
            kernels = 2 * config.taps * (hidden // config.group)
            out[f"{layer}.{conv}.base_kernel"] = Parameter((2, config.taps, hidden))
            out[f"{layer}.{conv}.kernel_projection.weight"] = Parameter(
                (kernels, hidden)
            )
    return out | _head_parameters(config)


def _head_parameters(config: BlockConfig) -> dict[str, Parameter]:
    vocab, rank, hidden = config.vocab_size, config.rank, config.hidden_size
    if config.family == "dflash2":
        name = "candidate_selector"
        return {
            f"{name}.predecessor_codebook": Parameter((vocab, rank), "zeros"),
            f"{name}.successor_codebook": Parameter((vocab, rank), "zeros"),
            f"{name}.hidden_projection.weight": Parameter((rank, hidden)),
        }
    if config.family == "dflash":
        return {}
    out = {
        "markov_head.markov_w1.weight": Parameter((vocab, rank)),
        "markov_head.markov_w2.weight": Parameter((vocab, rank)),
    }
    if config.head == "gated":
        out["markov_head.gate_proj.weight"] = Parameter((rank, hidden + rank))
        out["markov_head.gate_proj.bias"] = Parameter((rank,))
    if config.head == "rnn":
        out["markov_head.joint_proj.weight"] = Parameter((3 * rank, 2 * rank + hidden))
        out["markov_head.joint_proj.bias"] = Parameter((3 * rank,))
    return out


def _resolved(name: str, parameters: dict[str, Parameter]) -> str | None:
    for candidate in (name, name.removeprefix("model."), _ALIASES.get(name, "")):
        if candidate in parameters:
            return candidate
    return None


def load_block_weights(
    folder: Path, config: BlockConfig, dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], LoadReport]:
    """Load an export as SGLang does.

    Args:
        folder: The export.
        config: The resolved configuration.
        dtype: The parameters' dtype: tensors are cast to it as ``copy_`` does.

    Returns:
        Values by name, for fused parameters by part; the report.

    Raises:
        ServingError: a shape does not fit, or a Markov tensor that the head lacks.
    """
    parameters = block_parameters(config)
    values: dict[str, torch.Tensor] = {}
    report = LoadReport()
    for source, tensor in read_tensors(folder):
        if config.family == "dspark" and source.startswith("confidence_head."):
            # It exists only with SGLANG_RAGGED_VERIFY_MODE, for no logit.
            values[source] = tensor.to(dtype)
            continue
        if config.family == "dspark" and _skipped(source):
            continue
        place, part = _place(source, parameters)
        if place is None:
            if config.family == "dspark" and source.startswith("markov_head."):
                raise ServingError(f"unexpected markov weight {source}")
            report.dropped.append(source)
            continue
        shards = parameters[place].shards
        pieces = [(part, tensor)]
        if shards and not part:
            sizes = [size for _, size in shards]
            if tensor.shape[0] != sum(sizes):
                raise ServingError(f"{source} has {tensor.shape[0]} rows")
            pieces = list(
                zip([name for name, _ in shards], tensor.split(sizes), strict=True)
            )
        for shard, piece in pieces:
            shape = parameters[place].shape
            if shard:
                shape = (dict(shards)[shard], *shape[1:])
            key = part_name(place, shard)
            if tuple(piece.shape) != shape:
                found = list(piece.shape)
                raise ServingError(f"{source} is {found}, {key} is {list(shape)}")
            if key in values:
                report.doubled.append(key)
            values[key], report.filled[key] = piece.to(dtype), source
    _fill(values, parameters, report, dtype)
    return values, report


def _skipped(name: str) -> bool:
    return name.removeprefix("model.").startswith(_SKIPPED_BY_DSPARK)


def _place(name: str, parameters: dict[str, Parameter]) -> tuple[str | None, str]:
    for fused, single, shard in STACKED:
        if f"{single}." in name:
            found = _resolved(name.replace(single, fused), parameters)
            if found is not None:
                return found, shard
    return _resolved(name, parameters), ""


def _fill(
    values: dict[str, torch.Tensor],
    parameters: dict[str, Parameter],
    report: LoadReport,
    dtype: torch.dtype,
) -> None:
    for seed, (name, parameter) in enumerate(parameters.items()):
        for offset, (part, rows) in enumerate(
            parameter.shards or (("", parameter.shape[0]),)
        ):
            key = part_name(name, part)
            if key not in values:
                shape = (rows, *parameter.shape[1:])
                report.missing[key] = parameter.initial
                values[key] = initial_value(
                    shape, parameter.initial, 1000 * seed + offset, dtype
                )
