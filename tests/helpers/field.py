"""Tiny fixtures of the field cases: T0, a Llama target, and E0, an EAGLE-3 draft.

Files are written as speculators and transformers write them: a nested config.json
and one safetensors file. Values are random, norms far from one.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

H, HEADS, DIM, LAYERS, VOCAB, DRAFT, INNER = 8, 2, 4, 6, 32, 12, 16
Tensors = dict[str, torch.Tensor]


def random_values(seed: int, shapes: dict[str, tuple[int, ...]]) -> Tensors:
    """Values for tensors of these shapes, norms around one, in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, shape in shapes.items():
        value = torch.randn(shape, generator=generator) * 0.5
        out[name] = (value + 1.0 if "norm" in name else value).to(torch.bfloat16)
    return out


def target_config(**changes: Any) -> dict[str, Any]:
    """T0's config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": H,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        **changes,
    }


def make_target(
    folder: Path, *, tied: bool = False, weights: bool = True, **changes: Any
) -> Path:
    """Write T0; a tied one has no head tensor."""
    folder.mkdir(parents=True, exist_ok=True)
    config = target_config(tie_word_embeddings=tied, **changes)
    (folder / "config.json").write_text(json.dumps(config))
    if weights:
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (VOCAB, H),
            "model.norm.weight": (H,),
        }
        if not tied:
            shapes["lm_head.weight"] = (VOCAB, H)
        held = random_values(1, shapes)
        save_file(held, folder / "model.safetensors", {"format": "pt"})
    return folder


def draft_ids() -> torch.Tensor:
    """The twelve target ids of E0's vocabulary, ascending."""
    return torch.tensor([0, 2, 3, 5, 7, 8, 11, 13, 17, 21, 26, 31])


def draft_config(target: Path | str | None, **changes: Any) -> dict[str, Any]:
    """E0's config.json, as speculators 0.9 writes it.

    Args:
        target: What ``verifier.name_or_path`` says.
        changes: Top-level keys; ``layer=...`` merges into the layer config, a
            value of ``...`` removes the key.
    """
    layer_changes = changes.pop("layer", {})
    config: dict[str, Any] = {
        "architectures": ["Eagle3DraftModel"],
        "auto_map": {"": "config.Eagle3SpeculatorConfig"},
        "draft_vocab_size": DRAFT,
        "dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
        "embed_requires_grad": False,
        "fc_norm": False,
        "norm_before_fc": False,
        "norm_before_residual": False,
        "norm_output": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "accept_tolerance": 0.0,
                    "proposal_type": "greedy",
                    "speculative_tokens": 3,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {
                "architectures": ["LlamaForCausalLM"],
                "name_or_path": None if target is None else str(target),
            },
        },
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "head_dim": DIM,
            "hidden_act": "silu",
            "hidden_size": H,
            "initializer_range": 0.02,
            "intermediate_size": INNER,
            "layer_types": ["full_attention"],
            "max_position_embeddings": 64,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": HEADS,
            "num_hidden_layers": 1,
            "num_key_value_heads": HEADS,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            "sliding_window": None,
            "tie_word_embeddings": False,
            "use_cache": True,
            "vocab_size": VOCAB,
        },
        "transformers_version": "5.19.0",
    }
    config = _changed(config, changes)
    config["transformer_layer_config"] = _changed(
        config["transformer_layer_config"], layer_changes
    )
    return config


def _changed(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = {**copy.deepcopy(config), **changes}
    return {k: v for k, v in merged.items() if v is not ...}


def draft_tensors(target: Path | None = None) -> Tensors:
    """E0's tensors; embedding and head are copies of the target's if it is given."""
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (H, 3 * H),
        "norm.weight": (H,),
        "lm_head.weight": (DRAFT, H),
        "embed_tokens.weight": (VOCAB, H),
        "layers.0.input_layernorm.weight": (H,),
        "layers.0.hidden_norm.weight": (H,),
        "layers.0.post_attention_layernorm.weight": (H,),
        "layers.0.mlp.gate_proj.weight": (INNER, H),
        "layers.0.mlp.up_proj.weight": (INNER, H),
        "layers.0.mlp.down_proj.weight": (H, INNER),
        "layers.0.self_attn.o_proj.weight": (H, H),
        **{f"layers.0.self_attn.{p}_proj.weight": (H, 2 * H) for p in "qkv"},
    }
    tensors = random_values(2, shapes)
    ids = draft_ids()
    if target is not None and (target / "model.safetensors").exists():
        from safetensors.torch import load_file

        held = load_file(target / "model.safetensors")
        embed = held["model.embed_tokens.weight"]
        head = held.get("lm_head.weight", embed)
        tensors["embed_tokens.weight"] = embed.clone()
        tensors["lm_head.weight"] = head[ids].clone()
    tensors["d2t"] = ids - torch.arange(DRAFT)
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[ids] = True
    tensors["t2d"] = mask
    return tensors


def write_draft(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    """Write a checkpoint folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {k: v.contiguous() for k, v in tensors.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    return folder


def make_draft(folder: Path, target: Path | None, **changes: Any) -> Path:
    """E0 as it is, with changes of its configuration."""
    return write_draft(folder, draft_config(target, **changes), draft_tensors(target))
