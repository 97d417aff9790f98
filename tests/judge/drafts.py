"""Tiny drafts for the judge's tests: the real training class and an export of it.

The export is written by fifteen lines of its own, not by spec_export's exporter.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig

from spec_export.judge import Inputs

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
THETA = {"rope_type": "default", "rope_theta": 5000.0}


@dataclass
class Draft:
    module: Eagle3DraftModel
    config: dict[str, Any]  # what a checkpoint's config.json says
    embed: torch.Tensor

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        state = self.module.state_dict()
        return {k: v for k, v in state.items() if not k.startswith("verifier_")}

    def inputs(self, positions: int = 40, seed: int = 3) -> Inputs:
        return Inputs.for_config(self.config, positions=positions, seed=seed)


def make_draft(
    layers: int = 1,
    draft_vocab: int = 48,
    rope: dict[str, Any] | None = None,
    arch: type = LlamaConfig,
    aux_ids: tuple[int, ...] = (2, 4, 5),
    dtype: torch.dtype = torch.float32,
    attention: str = "eager",
    seed: int = 0,
    layer: dict[str, Any] | None = None,
    **flags: Any,
) -> Draft:
    """A draft with random weights, norms far from 1 and a scattered token map."""
    torch.manual_seed(seed)
    sizes = {**SIZES, **(layer or {})}
    tlc = arch(num_hidden_layers=layers, rope_parameters=dict(rope or THETA), **sizes)
    tlc._attn_implementation = attention
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=tlc,
        draft_vocab_size=draft_vocab,
        eagle_aux_hidden_state_layer_ids=list(aux_ids),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
        **flags,
    )
    module = Eagle3DraftModel(config)
    for name, parameter in module.named_parameters():
        if "norm" in name:
            value = torch.exp2(torch.rand(parameter.shape) * 4 - 2)
        else:
            value = torch.randn(parameter.shape) / parameter.shape[-1] ** 0.5
        # Not module.to(dtype), which would round the rotary frequencies too.
        parameter.data = value.to(dtype)
    if draft_vocab != sizes["vocab_size"]:
        kept = torch.randperm(sizes["vocab_size"])[:draft_vocab].sort().values
        mask = torch.zeros(sizes["vocab_size"], dtype=torch.bool)
        mask[kept] = True
        module.load_vocab_mappings(mask, kept - torch.arange(draft_vocab))
    return Draft(module, config.to_dict(), module.embed_tokens.weight.detach().clone())


def serving_tensors(draft: Draft) -> dict[str, torch.Tensor]:
    """Names of SGLang's class, written down independently of the templates."""
    out = {}
    for name, value in draft.weights.items():
        if name in ("embed_tokens.weight", "t2d"):
            continue
        parts = name.split(".")
        if parts[0] == "layers" and parts[1] != "0" and parts[2] == "input_layernorm":
            name = name.replace("input_layernorm", "hidden_norm")
        if parts[0] == "layers" and len(draft.module.layers) == 1:
            name = name.replace("layers.0", "midlayer")
        out[name] = value.contiguous()
    return out


def serving_config(draft: Draft, plugin: bool = False) -> dict[str, Any]:
    """config.json of the export, by hand."""
    config, layer = draft.module.config, draft.module.config.transformer_layer_config
    rope = dict(layer.rope_parameters)
    keys = (*SIZES, "num_hidden_layers", "hidden_act")
    out = {key: getattr(layer, key) for key in keys} | {
        "architectures": [
            "SpecExportEagle3ForCausalLM" if plugin else "LlamaForCausalLMEagle3"
        ],
        "model_type": "llama",
        "dtype": str(draft.module.dtype).removeprefix("torch."),
        "torch_dtype": str(draft.module.dtype).removeprefix("torch."),
        "draft_vocab_size": config.draft_vocab_size,
        "num_aux_hidden_states": len(config.eagle_aux_hidden_state_layer_ids),
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
        "tie_word_embeddings": False,
        "norm_output": config.norm_output,
        "fc_norm": config.fc_norm,
        "norm_before_fc": config.norm_before_fc,
    }
    if plugin:
        out |= {
            "norm_before_residual": config.norm_before_residual,
            "attention_bias": layer.attention_bias,
            "mlp_bias": getattr(layer, "mlp_bias", False),
            "qk_norm": layer.model_type == "qwen3",
            "layer_types": getattr(layer, "layer_types", None),
            "sliding_window": getattr(layer, "sliding_window", None),
        }
    return out


def write_export(
    folder: Path,
    draft: Draft,
    *,
    plugin: bool = False,
    tensors: dict[str, torch.Tensor] | None = None,
    **config: Any,
) -> Path:
    """An export folder; keywords change config.json (``...`` drops a key)."""
    folder.mkdir(parents=True, exist_ok=True)
    written = serving_config(draft, plugin) | config
    written = {key: value for key, value in written.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(written))
    save_file(
        {
            k: v.contiguous().clone()
            for k, v in (tensors or serving_tensors(draft)).items()
        },
        folder / "model.safetensors",
    )
    return folder
