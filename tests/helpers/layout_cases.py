"""Configurations of the field cases' T0, E0 and F0, and plans made of them.

Names, shapes and configurations only; ``tests.helpers.field`` has files with values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packaging.version import Version

from spec_export.findings import Finding, Severity
from spec_export.layout.accounting import expected_tensors
from spec_export.layout.catalog import templates
from spec_export.layout.plan import make_plan
from spec_export.layout.plan_types import Plan
from spec_export.layout.targets import TargetFacts, target_facts
from spec_export.layout.tensors import TensorInfo
from spec_export.layout.variables import read_variables

T0: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 6,
    "hidden_size": 8,
    "vocab_size": 32,
    "max_position_embeddings": 64,
}
LAYER: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": 32,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def eagle3(layer: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """E0's config.json; a value of ``...`` removes the key."""
    return _without(
        {
            "speculators_model_type": "eagle3",
            "architectures": ["Eagle3DraftModel"],
            "draft_vocab_size": 12,
            "norm_before_residual": False,
            "norm_before_fc": False,
            "fc_norm": False,
            "norm_output": False,
            "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
            "target_hidden_size": None,
            "tie_word_embeddings": False,
            "transformer_layer_config": _without({**LAYER, **(layer or {})}),
            "speculators_config": {"proposal_methods": [{"speculative_tokens": 3}]},
            **changes,
        }
    )


def dflash(layer: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """F0's config.json with the whole vocabulary."""
    mine = {
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "layer_types": ["full_attention"] * 2,
        "sliding_window": None,
        "use_sliding_window": False,
    }
    return _without(
        {
            "speculators_model_type": "dflash",
            "architectures": ["DFlashDraftModel"],
            "draft_vocab_size": 32,
            "aux_hidden_state_layer_ids": [2, 3, 5],
            "block_size": 4,
            "mask_token_id": 31,
            "sample_from_anchor": False,
            "sliding_window_non_causal": False,
            "target_hidden_size": None,
            "transformer_layer_config": _without({**LAYER, **mine, **(layer or {})}),
            "speculators_config": {"proposal_methods": [{"speculative_tokens": 3}]},
            **changes,
        }
    )


def _without(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if value is not ...}


def tensors_of(config: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """What speculators saves for a configuration, by the stock template."""
    template = templates(config["speculators_model_type"])[0]
    values, _ = read_variables(template, config, T0, None)
    return expected_tensors(template, values)


def plan_of(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo] | None = None,
    *,
    target: Mapping[str, Any] | TargetFacts | None = T0,
    release: str = "0.5.23",
    **options: Any,
) -> Plan:
    """Plan with defaults: the tensors that belong to the configuration, T0, never
    the plug-in."""
    facts = target_facts(target, "own") if isinstance(target, Mapping) else target
    options.setdefault("plugin", "never")
    held = tensors_of(config) if tensors is None else tensors
    return make_plan(config, held, facts, Version(release), **options)


def errors(plan: Plan) -> list[Finding]:
    return [f for f in plan.findings if f.severity is Severity.ERROR]


def only_error(plan: Plan, code: str) -> Finding:
    """The one error, which has this code."""
    found = errors(plan)
    assert [f.code for f in found] == [code], found
    return found[0]
