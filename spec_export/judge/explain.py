"""What explains that one stage of the forward differs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from spec_export.judge.inputs import Inputs
from spec_export.judge.reference.block import BlockReference
from spec_export.judge.reference.eagle3 import Eagle3Reference
from spec_export.judge.reference.mtp import MtpReference
from spec_export.judge.seeded import uniform

# Stage of a layer -> (parameter of the serving model, part, tensor of training).
_LAYER_TENSORS = {
    "embedding norm": ("input_layernorm", "", "input_layernorm"),
    "input norm": ("hidden_norm", "", "input_layernorm"),
    "q": ("self_attn.qkv_proj", "q", "self_attn.q_proj"),
    "k": ("self_attn.qkv_proj", "k", "self_attn.k_proj"),
    "v": ("self_attn.qkv_proj", "v", "self_attn.v_proj"),
    "q norm": ("self_attn.q_norm", "", "self_attn.q_norm"),
    "k norm": ("self_attn.k_norm", "", "self_attn.k_norm"),
    "attention output": ("self_attn.o_proj", "", "self_attn.o_proj"),
    "post-attention norm": (
        "post_attention_layernorm",
        "",
        "post_attention_layernorm",
    ),
    "MLP gate": ("mlp.gate_up_proj", "gate", "mlp.gate_proj"),
    "MLP up": ("mlp.gate_up_proj", "up", "mlp.up_proj"),
    "MLP output": ("mlp.down_proj", "", "mlp.down_proj"),
}
_TENSORS = {
    "features norm": "input_norm",
    "fused features": "fc",
    "embedding": "embed_tokens",
    "final norm": "norm",
    "logits": "lm_head",
}


@dataclass(frozen=True)
class _Owner:
    """The tensor of a stage: its name on the serving side and in training."""

    serving: str
    training: str


def _owner(stage: str) -> _Owner | None:
    if match := re.fullmatch(r"feature norm (\d+)", stage):
        name = f"fc_norm.{match[1]}"
        return _Owner(name, name)
    if match := re.fullmatch(r"layer (\d+) (.+)", stage):
        layer = f"layers.{match[1]}"
        if match[2] not in _LAYER_TENSORS:
            return None
        serving, part, training = _LAYER_TENSORS[match[2]]
        if match[2] == "input norm" and match[1] == "0":
            training = "hidden_norm"
        suffix = f"|{part}" if part else ""
        return _Owner(f"{layer}.{serving}{suffix}", f"{layer}.{training}")
    name = _TENSORS.get(stage, "")
    return _Owner(name, name) if name else None


@dataclass(frozen=True)
class Case:
    """A stage that differs although its inputs agree.

    Attributes:
        draft: The training class.
        reference: The serving side.
        inputs: The rows of the comparison.
        saved: Dtype at which the training side's weights were compared.
        stage: The stage.
        in_training: Whether training computes it at all.
        in_serving: Whether the serving side does.
    """

    draft: Any
    reference: Eagle3Reference
    inputs: Inputs
    saved: torch.dtype
    stage: str
    in_training: bool
    in_serving: bool


def explain(case: Case) -> str:
    """Say which tensor or configuration key makes a stage differ."""
    owner = _owner(case.stage)
    if owner is not None and case.in_training and case.in_serving:
        for kind in ("weight", "bias"):
            said = _tensor_differs(case, owner, kind)
            if said:
                return said
    return _configuration(case)


def _tensor_differs(case: Case, owner: _Owner, kind: str) -> str | None:
    """What is wrong with the tensor of a stage, or None if it is the trained one."""
    reference = case.reference
    base, _, part = owner.serving.partition("|")
    key = f"{base}.{kind}" + (f"[{part}]" if part else "")
    name = f"{owner.training}.{kind}"
    trained = dict(case.draft.named_parameters()).get(name)
    served = reference.weights.get(key)
    if trained is None and served is None:
        return None
    if served is None:
        return f"{name} of training has no place in the serving model"
    if key in reference.report.missing:
        held = reference.report.missing[key]
        said = {"ones": "all ones", "zeros": "all zeros"}
        what = said.get(held, "uninitialised memory")
        absent = "no tensor of that name in the export"
        return f"{key} is {what} in the serving model: {absent}"
    source = reference.report.filled.get(key, f"{key} (the target's)")
    if trained is None:
        return f"{source} sets {key}, which training does not have"
    if key == "lm_head.weight" and reference.config.tied:
        return "config key tie_word_embeddings: SGLang takes the embedding as the head"
    trained = trained.detach()
    if base == "embed_tokens":
        rows = case.inputs.token_ids.unique()
        trained = trained[rows.to(trained.device)]
        served = served[rows.to(served.device)]
        source = f"{key} (the target's)"
    dtype = reference.config.dtype
    mine = trained.to(case.saved).cpu()
    theirs = served.to(getattr(torch, dtype)).cpu()
    if mine.shape == theirs.shape:
        if torch.equal(mine.double(), theirs.double()):
            return None
        if torch.equal(mine.to(theirs.dtype), theirs):
            return f"{source} is rounded: config key dtype makes SGLang hold {dtype}"
    how = next(_relations(case.draft, theirs, mine.to(theirs.dtype), name), None)
    if how is None:
        apart = (mine.double() - theirs.double()).abs().max().item()
        how = f"differs from {name} of training by up to {apart:.3g}"
    return f"{source} {how}"


def _relations(
    draft: Any, served: torch.Tensor, trained: torch.Tensor, name: str
) -> Iterator[str]:
    """Ways in which a tensor can be the trained one and yet wrong."""
    for other, value in draft.named_parameters():
        if other == name or value.shape != served.shape:
            continue
        if torch.equal(value.detach().to(served.dtype).cpu(), served):
            yield f"holds what training calls {other}"
    if served.ndim == 2 and torch.equal(served, trained.T):
        yield f"is {name} of training transposed"
    if served.shape != trained.shape:
        return
    if torch.equal(served, -trained):
        yield f"is {name} of training negated"
    for dim, what in enumerate(("rows", "columns")[: served.ndim]):
        for by in (1, -1):
            if torch.equal(served, trained.roll(by, dim)):
                yield f"has the {what} of {name} shifted by {by}"
        if torch.allclose(_signature(served, dim), _signature(trained, dim)):
            yield f"has the {what} of {name} in another order"


def _signature(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """One number per row (0) or column (1), sorted: the same in any order of them."""
    lines = tensor.double() if dim == 0 else tensor.double().T
    if lines.ndim == 2:
        lines = lines @ uniform(lines.shape[1], 1).double()
    return lines.sort().values


def _configuration(case: Case) -> str:
    config, trained = case.reference.config, case.draft.config
    layer, stage = trained.transformer_layer_config, case.stage
    in_training, in_serving = case.in_training, case.in_serving

    def key(name: str, serving: Any, training: Any) -> str:
        sides = f"{serving} in the serving model, {training} in training"
        return f"config key {name}: {sides}"

    release = ".".join(map(str, config.release[:3]))
    if stage == "features norm" and in_serving != in_training:
        return key("norm_before_fc", in_serving, in_training) + f" (release {release})"
    if stage.startswith("feature norm") and in_serving != in_training:
        return key("fc_norm", in_serving, in_training) + f" (release {release})"
    if stage == "fused features" and config.num_aux == 1 and not config.always_fc:
        return (
            "SGLang skips fc where a feature has the width of the draft (one auxiliary "
            "layer)"
        )
    if stage == "recurrent state" and config.norm_output != trained.norm_output:
        return key("norm_output", config.norm_output, trained.norm_output)
    if stage.endswith("norm") and config.eps != layer.rms_norm_eps:
        return key("rms_norm_eps", config.eps, layer.rms_norm_eps)
    if stage.endswith(("q norm", "k norm")) and in_serving != in_training:
        return key("qk_norm", in_serving, in_training)
    if stage == "layer 0 post-attention norm":
        mine = trained.norm_before_residual
        if config.norm_before_residual != mine:
            return key("norm_before_residual", config.norm_before_residual, mine)
    if stage.endswith(" attention"):
        return _attention(case)
    return "its tensors agree: the two sides compute this stage differently"


def _attention(case: Case) -> str:
    """The shape of the heads, the rotary embedding or the window."""
    draft, reference = case.draft, case.reference
    config, layer = reference.config, draft.config.transformer_layer_config
    heads = (config.num_heads, config.num_kv_heads, config.head_dim)
    wanted = (layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim)
    if heads != wanted:
        return f"heads, kv heads, head_dim: {heads} in the serving model, not {wanted}"
    positions = case.inputs.position_ids
    sample = draft.fc.weight[:1, :1].float()
    cos, sin = draft.rotary_emb(sample, positions[None].to(sample.device))
    half = cos.shape[-1] // 2
    mine = torch.cat([cos[0, :, :half], sin[0, :, :half]], -1).cpu()
    theirs = torch.cat(reference.rope.table(positions), -1).cpu()
    if mine.shape != theirs.shape or not torch.allclose(mine, theirs, atol=1e-4):
        rope = dict(layer.rope_parameters)
        apart = [
            f"{name} {config.rope.get(name)} in the serving model, {rope.get(name)} in "
            "training"
            for name in sorted({*rope, *config.rope})
            if config.rope.get(name) != rope.get(name)
        ]
        if config.rotary_dim != 2 * half:
            apart.append(f"partial_rotary_factor turns {config.rotary_dim} channels")
        return "rotary embedding: " + ("; ".join(apart) or "computed differently")
    if not config.neox:
        return "config key rope_is_neox_style: False in the serving model"
    index = int(case.stage.split()[1])
    window = reference.window_of(index)
    keys = None if window is None else window + 1
    trained = draft.sliding_window if index in draft.sliding_window_indices else None
    if keys != trained:
        sides = f"{trained or 'all'} keys in training, {keys or 'all'} in the serving"
        return f"attention window: {sides} model (--speculative-draft-window-size)"
    return "q, k, v and rotary embedding agree: the two sides attend differently"


def token_map_differences(
    reference: Eagle3Reference | BlockReference | MtpReference, trained: torch.Tensor
) -> list[str]:
    """What is wrong with the serving side's token map; empty if it is right.

    Args:
        reference: The serving side.
        trained: Target id of each draft id in training, int64 [draft vocabulary].
    """
    held = reference.config.draft_vocab_size
    if held != len(trained):
        return [f"draft_vocab_size is {held}, training has {len(trained)} draft tokens"]
    trained = trained.cpu()
    if reference.hot_token_id is None:
        if torch.equal(trained, torch.arange(held)):
            return []
        return ["no d2t tensor in the export: SGLang takes draft ids for target ids"]
    served = reference.hot_token_id.cpu()
    if served.shape != trained.shape:
        return [f"d2t has {len(served)} entries, training has {held} draft tokens"]
    wrong = (served != trained).nonzero().reshape(-1)
    if not len(wrong):
        return []
    if torch.equal(served - torch.arange(held), trained):
        return ["d2t holds absolute ids, SGLang adds the draft id to each"]
    first = int(wrong[0])
    here, there = int(served[first]), int(trained[first])
    count = f"d2t sends {len(wrong)} of {held} draft ids to another token"
    example = f"draft id {first} is token {here} in SGLang, {there} in training"
    return [f"{count}: {example}"]
