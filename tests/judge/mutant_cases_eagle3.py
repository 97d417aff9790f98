"""EAGLE-3 drafts that together exercise every rule of their two templates."""

from __future__ import annotations

from typing import Any

import survivors as why
from drafts import THETA, Draft, make_draft
from mutants import QUANTISED, Case, changed
from transformers import Qwen3Config

STOCK, PLUGIN = "eagle3-llama", "eagle3-plugin"
TEMPLATES = [STOCK, PLUGIN]
TARGET = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 8,
    "hidden_size": 32,
    "vocab_size": 96,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    **THETA,
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.5,
    "high_freq_factor": 6.0,
    "original_max_position_embeddings": 256,
}


def case(
    name: str,
    template: str,
    draft: Draft,
    source: Any = (),
    *,
    whole: bool = False,
    **more: Any,
) -> Case:
    """A case of a draft; ``source`` changes what its config.json says.

    ``whole``: the source has the tensors of the training loss too.
    """
    head = draft.weights["lm_head.weight"]
    loss = {"verifier_lm_head.weight": head, "verifier_norm.weight": head[0]}
    return Case(
        name,
        template,
        draft.module,
        changed(draft.config, dict(source)),
        draft.weights | (loss if whole else {}),
        draft.embed,
        head,
        **{"target": TARGET, **more},
    )


def sliding(kinds: str, size: int) -> dict[str, Any]:
    """Window keys of a layer config: ``sf`` is one sliding and one full layer."""
    names = {"s": "sliding_attention", "f": "full_attention"}
    return {"layer_types": [names[k] for k in kinds], "sliding_window": size}


def servable() -> list[Case]:
    """Drafts that have an exact export."""
    return [
        case("plain", STOCK, make_draft(1, layer={"head_dim": 16}), whole=True),
        case(
            "before",
            STOCK,
            make_draft(1, norm_before_fc=True, layer=sliding("f", 4)),
            target=TARGET | QUANTISED,
        ),
        case(
            "two",
            STOCK,
            make_draft(2, aux_ids=(1, 3, 4, 6), fc_norm=True, norm_output=True),
        ),
        case(
            "whole",
            STOCK,
            make_draft(1, 96, rope=LLAMA3, layer=sliding("s", 4)),
            {"tie_word_embeddings": True, "quantization_config": {"bits": 4}},
        ),
        case(
            "slim",
            STOCK,
            make_draft(1, 64, layer={"num_key_value_heads": 4}),
            slim=("lm_head.weight", "embed_tokens.weight"),
        ),
        case(
            "all",
            PLUGIN,
            make_draft(
                2,
                arch=Qwen3Config,
                norm_before_residual=True,
                norm_output=True,
                layer={
                    "attention_bias": True,
                    "use_sliding_window": True,
                    **sliding("sf", 4),
                },
            ),
        ),
        case(
            "biases",
            PLUGIN,
            make_draft(
                2,
                norm_before_fc=True,
                layer={"attention_bias": True, "mlp_bias": True},
            ),
            target=TARGET | QUANTISED,
        ),
        case(
            "feature",
            PLUGIN,
            make_draft(1, 96, aux_ids=(3,), fc_norm=True, layer={"head_dim": 16}),
        ),
        case("window", PLUGIN, make_draft(1, layer=sliding("s", 4))),
    ]


# Keys that configurations made by others lack, and what their absence means.
SPARSE = {
    "num_key_value_heads": ...,
    "head_dim": ...,
    "attention_bias": ...,
    "mlp_bias": ...,
    "layer_types": ...,
    "sliding_window": ...,
}


def alone() -> list[Case]:
    """Drafts with one feature each, so that no other one demands its release too."""
    made = {
        "layers": make_draft(2),
        "four": make_draft(1, aux_ids=(1, 3, 4, 6)),
        "fc_norm": make_draft(1, fc_norm=True),
        "output": make_draft(1, norm_output=True),
    }
    out = [case(name, STOCK, draft) for name, draft in made.items()]
    sparse = {f"transformer_layer_config.{key}": value for key, value in SPARSE.items()}
    flags = ("norm_before_fc", "fc_norm", "norm_output", "norm_before_residual")
    sparse |= dict.fromkeys(flags, ...)
    recipe = {"draft": {"norm_before_residual": False}}
    for template in TEMPLATES:
        draft = make_draft(1, layer={"num_key_value_heads": 4})
        out.append(case("sparse", template, draft, sparse, recipe=recipe))
    # What was read before 0.5.10 and 0.5.11: the older spellings, CUDA graphs.
    old = make_draft(1, aux_ids=(1, 3, 4), rope=LLAMA3)
    return [*out, case("old", STOCK, old, release="0.5.9")]


def refused() -> list[Case]:
    """Drafts that stock SGLang would compute wrongly: one for each refusal."""
    made = {
        "norm_before_residual": make_draft(1, norm_before_residual=True),
        "gelu": make_draft(1, layer={"hidden_act": "gelu"}),
        "mixed": make_draft(2, layer=sliding("sf", 4)),
        "feature": make_draft(1, aux_ids=(3,)),
        "qwen3": make_draft(1, arch=Qwen3Config),
        "attention bias": make_draft(1, layer={"attention_bias": True}),
        "mlp bias": make_draft(1, layer={"mlp_bias": True}),
        "narrow": make_draft(1, layer=sliding("s", 1)),
    }
    out = [case(name, STOCK, draft, refused=True) for name, draft in made.items()]
    return [*out, case("gelu", PLUGIN, made["gelu"], refused=True)]


def cases() -> list[Case]:
    return [*servable(), *alone(), *refused()]


TWICE = "the same is said by a second key, which SGLang reads first or instead"
SIZES_EMBEDDING = (
    "it sizes the embedding, which the target's replaces; verify holds it "
    "against the target's"
)
O_BIAS = "the stock class then has an o_proj.bias, zero where no tensor sets it"
REFUSED = (
    "such a draft stays refused: its tensors fit no rule, or that of another one "
    "refuses it"
)
WRITTEN = {
    r"vocab_size: .*": SIZES_EMBEDDING,
    r"(initializer_range|bos_token_id|eos_token_id): .*": why.UNREAD,
    r"max_position_embeddings: .*": why.CONTEXT,
    r"(hidden_act|eagle_config\.use_aux_hidden_state): dropped": why.DEFAULT,
    r"tie_word_embeddings: (dropped|null)": why.DEFAULT,
    r"norm_before_fc: .*": f"{TWICE}: that in eagle_config",
    r"eagle_config\.norm_before_fc: dropped": f"{TWICE}: the one beside",
    r"num_aux_hidden_states: (dropped|null)": f"{TWICE}: the layer ids are as many",
    r"dtype: (dropped|null)": f"{TWICE}: torch_dtype",
    r"rope_parameters\.rope_type: dropped": why.DEFAULT,
    r"rope_parameters\.rope_theta: dropped": f"{TWICE}: rope_theta",
    **why.LAUNCH,
}
WRITTEN_OF = {
    STOCK: {
        r"(attention_bias|mlp_bias): (dropped|null)": why.DEFAULT,
        r"attention_bias: wrong flag": O_BIAS,
        r"mlp_bias: wrong flag": "the stock class does not read it",
        r"rope_parameters\.(factor|low_freq_factor|high_freq_factor"
        r"|original_max_position_embeddings): .*": f"{TWICE}: rope_scaling, "
        "which wins in every release where it is there",
        r"rope_scaling\.(rope_type: dropped|type: .*)": f"{TWICE}: the other one",
    },
    # The plug-in's class starts at 0.5.12, where the newer spellings are read.
    PLUGIN: {r"(rope_theta|torch_dtype): .*": f"{TWICE}: the newer spelling"},
}
RULES = {
    **why.COMMON,
    **why.STEPS,
    r"config: (norm_before_fc: .*|eagle_config\.norm_before_fc: dropped)": TWICE,
    r"config: vocab_size: .*": SIZES_EMBEDDING,
    r"config: (initializer_range|bos_token_id|eos_token_id): .*": why.UNREAD,
    r"config: max_position_embeddings: .*": why.CONTEXT,
    r"config: (hidden_act|tie_word_embeddings|eagle_config\.use_aux_hidden_state)"
    r": dropped": why.DEFAULT,
    r"config: (attention_bias|mlp_bias): (dropped|value)": why.DEFAULT
    + f"; and {O_BIAS}",
    r"config: num_aux_hidden_states: (dropped|expr null)": TWICE,
    r"config: sliding_window: when true": "it is read for sliding layers only",
    r"refuse: config-invalid (fc_norm|transformer_layer_config(\.(model_type"
    r"|layer_types))?): dropped": why.NEVER,
    r"refuse: target-hidden-size .*: dropped": why.NEVER,
    r"refuse: (tie-flag-dropped|quantization-dropped) .*": why.INFORMS,
    r"features: .*: not removed": why.DEMANDS,
    r"flags: \['--disable-cuda-graph'\]: (when true|before dropped)": "CUDA graphs "
    "compute the same, only faster",
    r"flags: .*unquant'\]: since (lower|dropped)": "an older server does not know the "
    "flag and does not start",
    r"flags: .*window-size.*: not removed": "it says what config.json says",
    r"tensors: t2d: exists true": "it is dropped in any case, and checked by value",
    r"tensors: .*(q_norm|k_norm)\.weight: (dropped|(shape|i) off by one|kind"
    r"|deviation dropped)": REFUSED,
    r"tensors: .*_proj\.bias: (dropped|(shape|i|p) off by one|kind)": REFUSED,
    r"variables: (attention_bias|mlp_bias): source (missing|elsewhere)": REFUSED,
    r"variables: (tied|tied_layer|leftover_quantization): .*": why.INFORMS
    + "; the target's own quantisation has its own variable",
    r"variables: target_width: source (missing|elsewhere)": why.NEVER,
    r"variables: W: absent other": why.NEVER,
}
