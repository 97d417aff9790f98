"""config.json: an allow-list that every reader understands alike."""

from typing import Any

import pytest

from spec_export.layout.config import flatten
from tests.helpers.layout_cases import T0, dflash, eagle3, plan_of

EAGLE3 = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "vocab_size": 32,
    "draft_vocab_size": 12,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
    "num_aux_hidden_states": 3,
    "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [0, 2, 3],
        "use_aux_hidden_state": True,
        "norm_before_fc": False,
    },
}
DFLASH = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "vocab_size": 32,
    "draft_vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "block_size": 4,
    "num_target_layers": 6,
    "mask_token_id": 31,
    "dflash_config": {"target_layer_ids": [1, 2, 4], "mask_token_id": 31},
    "layer_types": ["full_attention", "full_attention"],
}
# What a source may hold and no reader may see.
STRANGERS: dict[str, Any] = {
    "auto_map": {"": "config.Eagle3SpeculatorConfig"},
    "num_nextn_predict_layers": 1,
    "target_hidden_size": None,
    "speculators_version": "0.9.0",
    "transformers_version": "5.19.0",
    "embed_requires_grad": False,
    "bias": True,
    "unheard_of": 3,
    "quantization_config": None,
}


def test_whole_eagle3_config() -> None:
    assert plan_of(eagle3()).config == EAGLE3


def test_whole_dflash_config() -> None:
    assert plan_of(dflash()).config == DFLASH


@pytest.mark.parametrize("make", [eagle3, dflash])
def test_strangers_are_not_written(make: Any) -> None:
    plan = plan_of(make(**STRANGERS))
    assert plan.ok
    assert plan.config == plan_of(make()).config
    listed = {c.key for c in plan.config_changes if c.to is None}
    assert {"auto_map", "unheard_of", "num_nextn_predict_layers", "bias"} <= listed


@pytest.mark.parametrize("make", [eagle3, dflash])
@pytest.mark.parametrize(
    "layer",
    [
        {},
        {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
        {"initializer_range": None},
        {"num_key_value_heads": None, "head_dim": None},
        {"attention_bias": None, "mlp_bias": None},
        {"sliding_window": None},
        {"layer_types": None},
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 2.0,
                "beta_fast": None,
                "mscale": None,
            }
        },
    ],
)
def test_no_null_anywhere(make: Any, layer: dict[str, Any]) -> None:
    plan = plan_of(make(layer))
    assert plan.config
    assert None not in flatten(plan.config).values()


def test_absent_sizes_are_written_out() -> None:
    config = plan_of(eagle3({"num_key_value_heads": ..., "head_dim": ...})).config
    assert (config["num_key_value_heads"], config["head_dim"]) == (2, 4)


def test_optional_keys_are_copied_when_there() -> None:
    layer = {"bos_token_id": 1, "eos_token_id": [2, 3], "initializer_range": 0.02}
    for make in (eagle3, dflash):
        config = plan_of(make(layer)).config
        assert {k: config[k] for k in layer} == layer


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_both_spellings_of_the_dtype(dtype: str) -> None:
    config = plan_of(eagle3(dtype="float64", torch_dtype="float64"), dtype=dtype).config
    assert config["dtype"] == config["torch_dtype"] == dtype


def test_both_spellings_of_rope() -> None:
    rope = {
        "rope_type": "yarn",
        "rope_theta": 5e5,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    config = plan_of(eagle3({"rope_parameters": rope})).config
    scaling = {k: v for k, v in rope.items() if k != "rope_theta"}
    assert config["rope_theta"] == 5e5
    assert config["rope_parameters"] == rope
    assert config["rope_scaling"] == {**scaling, "type": "yarn"}


def test_mrope_of_a_multimodal_target_is_dropped() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}
    for make in (eagle3, dflash):
        plan = plan_of(make({"rope_parameters": rope}))
        assert plan.ok
        assert not any("mrope" in key for key in flatten(plan.config))


def test_untranslatable_rope() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    plan = plan_of(eagle3({"rope_parameters": rope}))
    assert [f.code for f in plan.findings] == ["rope-untranslatable"]
    assert plan.findings[0].subject == "transformer_layer_config.rope_parameters"
    assert "dynamic" in plan.findings[0].message


@pytest.mark.parametrize("flag", ["norm_before_fc", "fc_norm", "norm_output"])
def test_flags_are_explicit_booleans(flag: str) -> None:
    for value in (False, True):
        switch: dict[str, Any] = {flag: value}
        config = plan_of(eagle3(**switch)).config
        assert config[flag] is value
    absent: dict[str, Any] = {flag: ...}
    assert plan_of(eagle3(**absent)).config[flag] is False


def test_norm_before_fc_stands_where_each_release_looks() -> None:
    config = plan_of(eagle3(norm_before_fc=True)).config
    assert config["norm_before_fc"] is config["eagle_config"]["norm_before_fc"] is True


@pytest.mark.parametrize("where", ["top", "layer"])
def test_inherited_tying_is_not_written(where: str) -> None:
    tied: dict[str, Any] = {"tie_word_embeddings": True}
    plan = plan_of(eagle3(**tied) if where == "top" else eagle3(tied))
    assert plan.ok and plan.config["tie_word_embeddings"] is False
    assert [f.code for f in plan.findings] == ["tie-flag-dropped"]
    assert "32" in plan.findings[0].message and "12" in plan.findings[0].message
    head = next(p for p in plan.placements if p.name == "lm_head.weight")
    assert head.sources == ("lm_head.weight",) and head.transform is None


@pytest.mark.parametrize("make", [eagle3, dflash])
def test_leftover_quantisation(make: Any) -> None:
    plan = plan_of(make(quantization_config={"quant_method": "awq"}))
    assert plan.ok and "quantization_config" not in plan.config
    assert [f.code for f in plan.findings] == ["quantization-dropped"]
    assert plan.launch[-2:] == ["--speculative-draft-model-quantization", "unquant"]
    assert plan_of(make()).launch[-1] != "unquant"


@pytest.mark.parametrize("nested", [False, True])
def test_quantised_target(nested: bool) -> None:
    quantised = {"quantization_config": {"quant_method": "fp8"}}
    target = {**T0, **quantised}
    if nested:  # a multimodal target keeps it beside its text_config
        target = {"architectures": T0["architectures"], "text_config": T0, **quantised}
    plan = plan_of(eagle3(), target=target)
    assert plan.launch[-2:] == ["--speculative-draft-model-quantization", "unquant"]


def test_changes_say_from_to_and_why() -> None:
    changes = {c.key: c for c in plan_of(eagle3()).config_changes}
    ids = changes["eagle_config.eagle_aux_hidden_state_layer_ids"]
    assert (ids.from_, ids.to) == ([1, 3, 4], [0, 2, 3])
    assert "output of the layer" in ids.rule
    name = changes["architectures"]
    assert name.from_ == ["Eagle3DraftModel"] and name.to == EAGLE3["architectures"]
    assert "0.5.10" in changes["rope_theta"].rule
    # What did not change is not listed.
    assert not {"hidden_size", "rope_parameters", "norm_before_fc"} & set(changes)
    assert "eagle_config.norm_before_fc" not in changes
    assert all(c.rule for c in changes.values())
    changes = {c.key: c for c in plan_of(dflash()).config_changes}
    ids = changes["dflash_config.target_layer_ids"]
    assert (ids.from_, ids.to) == ([2, 3, 5], [1, 2, 4])
    assert "dflash_config.mask_token_id" not in changes


def test_a_change_of_the_head_of_a_block_draft_is_listed() -> None:
    config = dflash(draft_vocab_size=12)
    plan = plan_of(config, release="0.5.18", allow=["reduced-vocabulary"])
    change = next(c for c in plan.config_changes if c.key == "draft_vocab_size")
    assert (change.from_, change.to) == (12, 32)


@pytest.mark.parametrize(("non_causal", "written"), [(False, False), (True, True)])
def test_windows_of_a_block_draft(non_causal: bool, written: bool) -> None:
    layer = {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 16,
        "use_sliding_window": False,
    }
    config = dflash(layer, sliding_window_non_causal=non_causal)
    written_config = plan_of(config, allow=["sliding-window-extent"]).config
    assert written_config["layer_types"] == layer["layer_types"]
    assert written_config["sliding_window"] == 16
    # transformers' Qwen3Config sets sliding_window to null without it
    assert written_config["use_sliding_window"] is True
    assert ("is_causal" in written_config) is written
    if written:
        assert written_config["is_causal"] is False
    full = plan_of(dflash(sliding_window_non_causal=non_causal)).config
    assert not {"is_causal", "sliding_window", "use_sliding_window"} & set(full)


def test_window_of_an_autoregressive_draft_is_not_in_the_file() -> None:
    layer = {"layer_types": ["sliding_attention"], "sliding_window": 16}
    config = plan_of(eagle3(layer)).config
    assert not {"layer_types", "sliding_window", "use_sliding_window"} & set(config)


def test_flatten() -> None:
    nested = {"a": 1, "b": {"c": {"d": 2}, "e": {}}, "f": [{"g": 1}]}
    assert flatten(nested) == {"a": 1, "b.c.d": 2, "b.e": {}, "f": [{"g": 1}]}
