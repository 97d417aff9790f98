"""Tiny MTP heads: speculators' own module, saved as it saves it, and their targets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import AutoConfig

VOCAB, HIDDEN, EXPERTS, STEPS = 64, 32, 3, 3
FIRST_STEP = "mtp-first-step"  # the deviation that every export has
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}
MOE = {
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}
# speculators' layers -> the target's class, and whether its sizes are nested.
TARGETS = {
    "qwen3_next": ("Qwen3NextForCausalLM", False),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", False),
    "qwen3_5_moe_text": ("Qwen3_5MoeForConditionalGeneration", True),
}


def _layer(kind: str) -> Any:
    sizes = SIZES if kind in ("qwen3_5_text", "qwen3") else SIZES | MOE
    config = AutoConfig.for_model(kind, **sizes)
    config._attn_implementation = "eager"
    return config


def _value(shape: torch.Size, name: str, generator: torch.Generator) -> torch.Tensor:
    if "norm" in name:  # 1 + weight in these models
        return torch.rand(shape, generator=generator) * 1.5 - 0.6
    return torch.randn(shape, generator=generator) / shape[-1] ** 0.5


def make_target(folder: Path, kind: str) -> Path:
    """Embedding, final norm, head and an MTP head, experts one by one."""
    architecture, nested = TARGETS[kind]
    text = json.loads(_layer(kind).to_json_string())
    config: dict[str, Any] = {"architectures": [architecture], "dtype": "bfloat16"}
    if nested:
        config |= {"model_type": "qwen3_5_moe", "text_config": text}
    else:
        config |= text | {"architectures": [architecture]}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(1)
    prefix = "model.language_model." if nested else "model."
    shapes = {
        f"{prefix}embed_tokens.weight": (VOCAB, HIDDEN),
        f"{prefix}norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    tensors = {
        name: _value(torch.Size(shape), name, generator).bfloat16()
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def make_mtp(folder: Path, target: Path, kind: str) -> Path:
    """Save an MTP draft with random weights, in bfloat16."""
    config = MTPSpeculatorConfig(
        transformer_layer_config=_layer(kind),
        speculators_config=SpeculatorsConfig(
            algorithm="mtp",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=STEPS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=str(target), architectures=[]),
        ),
    )
    model = MTPDraftModel(config)
    generator = torch.Generator().manual_seed(2)
    gone = ("embed_tokens", "lm_head", "verifier_lm_head")
    state = {
        name: _value(value.shape, name, generator).bfloat16()
        for name, value in model.state_dict().items()
        if name.split(".")[0] not in gone
    }
    folder.mkdir(parents=True)
    written = json.loads(config.to_json_string()) | {"dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(written))
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder
