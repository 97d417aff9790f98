"""Tiny DFlash, DFlash2 and DSpark drafts: speculators' own modules, saved as it saves
them, and the target whose embedding and head they use.

Weights are random, norms far from one, Markov tables large enough to decide: a weak
head hides every mistake that is made with it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.dflash import DFlashSpeculatorConfig
from speculators.models.dflash.core import DFlashDraftModel
from speculators.models.dflash2 import DFlash2SpeculatorConfig
from speculators.models.dflash2.core import DFlash2DraftModel
from speculators.models.dspark import DSparkSpeculatorConfig
from speculators.models.dspark.core import DSparkDraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import Qwen3Config

VOCAB, DRAFT_VOCAB, HIDDEN, LAYERS, MASK = 96, 40, 32, 8, 94
KINDS: dict[str, tuple[type, type]] = {
    "dflash": (DFlashSpeculatorConfig, DFlashDraftModel),
    "dflash2": (DFlash2SpeculatorConfig, DFlash2DraftModel),
    "dspark": (DSparkSpeculatorConfig, DSparkDraftModel),
}
SMALL = {
    "dflash": {},
    "dflash2": {"conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5},
    "dspark": {"markov_rank": 6},
}
# Layers with a window, as long as the context: a shorter one differs in SGLang.
MIXED: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 256,
    "use_sliding_window": True,
}
SLIDING = {**MIXED, "layer_types": ["sliding_attention"] * 2}


def _random(shape: torch.Size, name: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if "norm" in name:
        return torch.exp2(torch.rand(shape, generator=generator) * 3 - 1.5)
    value = torch.randn(shape, generator=generator)
    if "codebook" in name or "markov_w" in name or name.endswith("bias"):
        return value
    return value / shape[-1] ** 0.5


def make_target(folder: Path, **changes: Any) -> Path:
    """A Llama of 8 layers, of which only embedding, norm and head are there."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {
        "model.embed_tokens.weight": torch.Size((VOCAB, HIDDEN)),
        "model.norm.weight": torch.Size((HIDDEN,)),
        "lm_head.weight": torch.Size((VOCAB, HIDDEN)),
    }
    tensors = {
        name: _random(shape, name, seed).bfloat16()
        for seed, (name, shape) in enumerate(shapes.items())
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def make_block_draft(
    folder: Path,
    target: Path,
    kind: str = "dflash",
    *,
    layer: dict[str, Any] | None = None,
    reduced: bool = False,
    block_size: int = 4,
    sample_from_anchor: bool | None = None,
    seed: int = 10,
    **flags: Any,
) -> Path:
    """Save a draft as speculators' trainer does, in bfloat16."""
    config_class, model_class = KINDS[kind]
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "layer_types": ["full_attention", "full_attention"],
    }
    inner = Qwen3Config(**{**sizes, **(layer or {})})
    inner._attn_implementation = "eager"
    anchor = kind == "dspark" if sample_from_anchor is None else sample_from_anchor
    config = config_class(
        transformer_layer_config=inner,
        draft_vocab_size=DRAFT_VOCAB if reduced else VOCAB,
        block_size=block_size,
        aux_hidden_state_layer_ids=[2, 4, 5],
        mask_token_id=MASK,
        sample_from_anchor=anchor,
        speculators_config=SpeculatorsConfig(
            algorithm=kind,
            proposal_methods=[
                GreedyTokenProposalConfig(
                    speculative_tokens=block_size if anchor else block_size - 1
                )
            ],
            default_proposal_method="greedy",
            verifier=VerifierConfig(
                name_or_path=str(target), architectures=["LlamaForCausalLM"]
            ),
        ),
        **{**SMALL[kind], **flags},
    )
    model = model_class(config)
    for number, (name, parameter) in enumerate(model.named_parameters()):
        parameter.data = _random(parameter.shape, name, seed + number)
    if reduced:
        generator = torch.Generator().manual_seed(seed)
        kept = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values
        mask = torch.zeros(VOCAB, dtype=torch.bool)
        mask[kept] = True
        model.load_vocab_mappings(mask, kept - torch.arange(DRAFT_VOCAB))
    model.load_verifier_weights()
    if reduced:
        model._load_verifier_weights(overwrite_lm_head=True)  # its rows of the map
    state = {
        k: v.to(torch.bfloat16) if v.is_floating_point() else v
        for k, v in model.state_dict().items()
    }
    model.save_pretrained(folder, state_dict=state)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, "dtype": "bfloat16"}))
    return folder
