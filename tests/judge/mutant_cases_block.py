"""DFlash, DFlash2 and DSpark drafts that exercise every rule of their templates."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import survivors as why
from mutants import QUANTISED, Case, case_of_saved

from tests.helpers.blocks import MIXED, make_block_draft, make_target

DFLASH, REWRITTEN = "dflash-qwen3", "dflash-qwen3-as-dspark"
DFLASH2, DSPARK = "dflash2-qwen3", "dspark-qwen3"
TEMPLATES = [DFLASH, REWRITTEN, DFLASH2, DSPARK]
OF_CASE = ("source", "refused", "recipe", "allow")
# Values whose absence or change shows.
STRONG = {
    "rms_norm_eps": 1e-2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
}
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
# Block drafts get the embedding of such a target scaled.
OTHER_GEMMA = {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}
GEMMA = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "tie_word_embeddings": False,
}


def case(
    name: str,
    template: str,
    target: Any = (),
    whole: bool = False,
    layer: Any = (),
    **options: Any,
) -> Case:
    """A case of a draft; ``whole``: the source has its copies of the target's tensors.

    ``options`` are those of the case and of ``make_block_draft``.
    """
    mine = {key: options.pop(key) for key in OF_CASE if key in options}
    with tempfile.TemporaryDirectory() as made:
        place = make_target(Path(made) / "target", **dict(target))
        folder = make_block_draft(
            Path(made) / "draft", place, layer=STRONG | dict(layer), **options
        )
        copies = ("verifier_lm_head.weight", "verifier_norm.weight") if whole else ()
        return case_of_saved(name, template, folder, place, copies=copies, **mine)


def cases() -> list[Case]:
    rnn: dict[str, Any] = {"kind": "dspark", "markov_head_type": "rnn"}
    gated: dict[str, Any] = {"kind": "dspark", "markov_head_type": "gated"}
    bare: dict[str, Any] = {
        "kind": "dspark",
        "markov_rank": 0,
        "confidence_head_with_markov": False,
    }
    return [
        case("plain", DFLASH, whole=True),
        *[
            case(
                "scaled embedding",
                template,
                target=GEMMA,
                layer={"attention_bias": True},
                **options,
            )
            for template, options in {
                DFLASH: {},
                REWRITTEN: {"sample_from_anchor": True},
                DFLASH2: {"kind": "dflash2"},
                DSPARK: {"kind": "dspark"},
            }.items()
        ],
        case(
            "window",
            DFLASH,
            layer={**MIXED, "attention_bias": True, "head_dim": 16},
            target=QUANTISED,
        ),
        case(
            "both ways",
            DFLASH,
            layer={**MIXED, "rope_parameters": LINEAR},
            source={"quantization_config": {"bits": 4}},
            sliding_window_non_causal=True,
        ),
        case("from the anchor", REWRITTEN, sample_from_anchor=True),
        case("draft vocabulary", REWRITTEN, reduced=True),
        case(
            "plain",
            DFLASH2,
            kind="dflash2",
            layer=MIXED,
            sliding_window_non_causal=False,
        ),
        case("vanilla", DSPARK, kind="dspark"),
        case("behind", DSPARK, kind="dspark", sample_from_anchor=False),
        case("gated", DSPARK, reduced=True, **gated),
        case(
            "whole gated",
            DSPARK,
            layer=MIXED,
            sliding_window_non_causal=True,
            **gated,
        ),
        case("rnn", DSPARK, reduced=True, **rnn),
        case("whole rnn", DSPARK, layer=MIXED, **rnn),
        case("no head", DSPARK, **bare),
        case("map alone", DSPARK, reduced=True, **bare),
        *sparse(),
        *refused(),
    ]


def sparse() -> list[Case]:
    """Configurations of others and of older releases, which lack keys."""
    layer = "transformer_layer_config"
    keys = ("num_key_value_heads", "head_dim", "attention_bias", "layer_types")
    lacking = dict.fromkeys([f"{layer}.{key}" for key in keys], ...)
    lacking |= dict.fromkeys(("sliding_window_non_causal", "sample_from_anchor"), ...)
    older = {**lacking, "speculators_version": "0.6.0"}
    made = [
        ("older", DFLASH, older, {}),
        ("recorded", DFLASH, lacking, {"sample_from_anchor": False}),
        ("recorded", REWRITTEN, lacking, {"sample_from_anchor": True}),
    ]
    out = [
        case(
            name,
            template,
            source=source,
            layer={"num_key_value_heads": 4},
            recipe={"dflash": recorded} if recorded else None,
            **recorded,
        )
        for name, template, source, recorded in made
    ]
    unsaid: dict[str, Any] = {
        "layer": MIXED,
        "source": {"sliding_window_non_causal": ...},
    }
    return [
        *out,
        case("unsaid", DFLASH, sliding_window_non_causal=False, **unsaid),
        case(
            "unsaid",
            DFLASH2,
            kind="dflash2",
            sliding_window_non_causal=True,
            **unsaid,
        ),
    ]


def refused() -> list[Case]:
    """Drafts that a class would compute wrongly: one for each refusal."""
    narrow = {**MIXED, "sliding_window": 6}
    rnn: dict[str, Any] = {"kind": "dspark", "markov_head_type": "rnn"}
    made: list[tuple[str, str, dict[str, Any]]] = [
        ("draft vocabulary", DFLASH, {"reduced": True}),
        ("from the anchor", DFLASH, {"sample_from_anchor": True}),
        ("narrow", DFLASH, {"layer": narrow}),
        ("gelu", DFLASH, {"layer": {"hidden_act": "gelu"}}),
        ("mask", DFLASH, {"source": {"mask_token_id": 200}}),
        (
            "unknown scale",
            DFLASH,
            {"target": OTHER_GEMMA, "allow": ("target-unknown-family",)},
        ),
        ("from the anchor", DFLASH2, {"kind": "dflash2", "sample_from_anchor": True}),
        ("rnn behind", DSPARK, {**rnn, "sample_from_anchor": False}),
    ]
    return [
        case(f"{name}, refused", template, refused=True, **options)
        for name, template, options in made
    ]


SIBLING = (
    "another type of transformers: every key that the class reads is written, so no "
    "default of the type counts"
)
TARGETS_OWN = "embedding and head are the target's"
CONTAINS = "the window is as long as the context, and only has to be"
UNREACHED = (
    "the table biases ids outside of the draft vocabulary, by thousands, or nothing"
)
WRITTEN = {
    r"model_type: stale": SIBLING,
    r"(draft_vocab_size: .*|tie_word_embeddings: .*)": f"{why.UNREAD}; {TARGETS_OWN}",
    r"initializer_range: .*": why.UNREAD,
    r"max_position_embeddings: .*": why.CONTEXT,
    r"hidden_act: dropped": why.DEFAULT,
    r"enable_confidence_head: .*": "its presence decides a log line",
    r"layer_types: (dropped|null)": why.DEFAULT,
    r"rope_theta: .*": "every release that is right here reads rope_parameters",
    r"rope_parameters\.rope_type: dropped": why.DEFAULT,
    r"rope_parameters\.rope_theta: dropped": "rope_theta says it",
    r"(dtype: (dropped|null)|torch_dtype: .*)": "every release of these classes reads "
    "dtype, and torch_dtype without it",
    r"num_target_layers: (off by one|stale)": "it only bounds the layer ids",
    r"mask_token_id: .*": "the one in dflash_config is read",
    r"sliding_window: (off by one|stale)": CONTAINS,
}
WRITTEN_OF = {
    DFLASH: {
        r"vocab_size: .*": why.UNREAD,
        r"rope_parameters\.factor: .*": "rope_scaling is there too, and wins",
        r"rope_scaling\.(rope_type: dropped|type: .*)": "the other of the two says it",
    },
    REWRITTEN: {
        r"markov_head\.markov_w1\.weight: (stale|one value)": UNREACHED,
        r"markov_head\.markov_w2\.weight: stale": UNREACHED,
        r"confidence_head_with_markov: .*": "there is no confidence head",
    },
    DFLASH2: {
        r"dflash_config\.mask_token_id: (dropped)": "releases with DFlash2 read the "
        "one beside as well",
        r"num_target_layers: (dropped|null)": "releases with DFlash2 go without",
    },
}
RULES = {
    **why.COMMON,
    **why.HEAD,
    r"config: model_type: value": SIBLING,
    r"config: (draft_vocab_size|tie_word_embeddings): .*": TARGETS_OWN,
    r"config: (initializer_range|bos_token_id|eos_token_id): .*": why.UNREAD,
    r"config: max_position_embeddings: .*": why.CONTEXT,
    r"config: hidden_act: dropped": why.DEFAULT,
    r"config: num_target_layers: expr off by one": "it only bounds the layer ids",
    r"config: mask_token_id: .*": "the one in dflash_config is read",
    r"config: (sliding_window|use_sliding_window): when true": "sliding layers read it",
    r"config: sliding_window: expr off by one": CONTAINS,
    r"config: enable_confidence_head: .*": "its presence decides a log line",
    r"refuse: config-invalid (conv_group_size|block_size"
    r"|markov_head_type|transformer_layer_config(\.(layer_types|model_type"
    r"|sliding_window|mask_token_id))?|dflash_config\.mask_token_id"
    r"|speculators_config\..*): dropped": why.NEVER,
    r"refuse: (mask-token-is-special|quantization-dropped|confidence-head-absent) .*": (
        why.INFORMS
    ),
    r"refuse: target-unsupported .*": "the server raises at the first draft of such a "
    "target, and no other export avoids it",
    r"refuse: reduced-vocabulary .*: dropped": why.NEVER,
    r"derived: .* embedding_scale != 1: when true": "by 1, which changes nothing",
    r"derived: markov_head\..*: (value|values|outside) other": UNREACHED,
    r"variables: conf_flag: .*": "there is no confidence head",
    r"variables: (M_layer|M_nested): source .*": why.NEVER,
    r"variables: (eos|bos|pad|target_type|leftover_quantization): .*": why.INFORMS,
    r"variables: (W|sliding_layers): absent other": why.NEVER,
}
RULES_OF = {
    DFLASH: {
        r"tensors: (d2t|t2d): (dropped|exists (negated|true)|shape off by one|kind)": (
            "a draft with a map is refused"
        ),
        r"config: vocab_size: .*": why.UNREAD,
    },
    DSPARK: {
        r"tensors: d2t: fate dropped": "a transform takes it all the same",
        r"tensors: t2d: exists true": "it is dropped in any case, and checked by value",
    },
}
