"""DFlash, DFlash2 and DSpark drafts that exercise every rule of their templates."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from mutants import Case, changed, unrounded
from safetensors.torch import load_file
from survivors import (
    COMMON,
    CONTEXT,
    DEFAULT,
    INFORMS,
    NEVER,
    UNREAD,
)

from spec_export.judge import training_module
from tests.helpers.blocks import make_block_draft, make_target

DFLASH, REWRITTEN = "dflash-qwen3", "dflash-qwen3-as-dspark"
DFLASH2, DSPARK = "dflash2-qwen3", "dspark-qwen3"
TEMPLATES = [DFLASH, REWRITTEN, DFLASH2, DSPARK]
# Values whose absence or change shows.
STRONG = {
    "rms_norm_eps": 1e-2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
}
SLIDING = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 256,
    "use_sliding_window": True,
}
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
QUANTISED = {"quantization_config": {"quant_method": "fp8"}}
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
    source: Any = (),
    target: Any = (),
    refused: bool = False,
    whole: bool = False,
    recipe: dict[str, Any] | None = None,
    allow: tuple[str, ...] = (),
    layer: Any = (),
    **options: Any,
) -> Case:
    """A case of a draft that speculators saved; its values become float32.

    ``whole``: the source has its copies of the target's tensors too.
    """
    options["layer"] = STRONG | dict(layer)
    with tempfile.TemporaryDirectory() as made:
        place = make_target(Path(made) / "target", **dict(target))
        folder = make_block_draft(Path(made) / "draft", place, **options)
        config = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        weights = {name: unrounded(value) for name, value in tensors.items()}
        lent = {
            name: value.float()
            for name, value in load_file(place / "model.safetensors").items()
        }
        about = json.loads((place / "config.json").read_text())
    embed, head = lent["model.embed_tokens.weight"], lent["lm_head.weight"]
    offsets = weights.get("d2t")
    rows = head if offsets is None else head[offsets + torch.arange(len(offsets))]
    shared = {"embed_tokens.weight": embed, "lm_head.weight": rows}
    both = weights | shared
    if whole:
        both |= {"verifier_lm_head.weight": rows, "verifier_norm.weight": head[0]}
    return Case(
        name,
        template,
        training_module(config, both.__getitem__, list(both)),
        changed(config, dict(source)),
        both,
        embed,
        head,
        about,
        refused=refused,
        slim=() if whole else tuple(shared),
        recipe=recipe,
        allow=allow,
    )


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
            layer={**SLIDING, "attention_bias": True, "head_dim": 16},
            target=QUANTISED,
        ),
        case(
            "both ways",
            DFLASH,
            layer={**SLIDING, "rope_parameters": LINEAR},
            source={"quantization_config": {"bits": 4}},
            sliding_window_non_causal=True,
        ),
        case("from the anchor", REWRITTEN, sample_from_anchor=True),
        case("draft vocabulary", REWRITTEN, reduced=True),
        case(
            "plain",
            DFLASH2,
            kind="dflash2",
            layer=SLIDING,
            sliding_window_non_causal=False,
        ),
        case("vanilla", DSPARK, kind="dspark"),
        case("behind", DSPARK, kind="dspark", sample_from_anchor=False),
        case("gated", DSPARK, reduced=True, **gated),
        case(
            "whole gated",
            DSPARK,
            layer=SLIDING,
            sliding_window_non_causal=True,
            **gated,
        ),
        case("rnn", DSPARK, reduced=True, **rnn),
        case("whole rnn", DSPARK, layer=SLIDING, **rnn),
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
        "layer": SLIDING,
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
    narrow = {**SLIDING, "sliding_window": 6}
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
    r"(draft_vocab_size: .*|tie_word_embeddings: .*)": f"{UNREAD}; {TARGETS_OWN}",
    r"initializer_range: .*": UNREAD,
    r"max_position_embeddings: .*": CONTEXT,
    r"hidden_act: dropped": DEFAULT,
    r"enable_confidence_head: .*": "its presence decides a log line",
    r"layer_types: (dropped|null)": DEFAULT,
    r"rope_theta: .*": "every release that is right here reads rope_parameters",
    r"rope_parameters\.rope_type: dropped": DEFAULT,
    r"rope_parameters\.rope_theta: dropped": "rope_theta says it",
    r"(dtype: (dropped|null)|torch_dtype: .*)": "every release of these classes reads "
    "dtype, and torch_dtype without it",
    r"num_target_layers: (off by one|stale)": "it only bounds the layer ids",
    r"mask_token_id: .*": "the one in dflash_config is read",
    r"sliding_window: (off by one|stale)": CONTAINS,
}
WRITTEN_OF = {
    DFLASH: {
        r"vocab_size: .*": UNREAD,
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
    **COMMON,
    r"parameters: lm_head\.weight: .*": COMMON[r"parameters: embed_tokens\.weight: .*"],
    r"config: model_type: value": SIBLING,
    r"config: (draft_vocab_size|tie_word_embeddings): .*": TARGETS_OWN,
    r"config: (initializer_range|bos_token_id|eos_token_id): .*": UNREAD,
    r"config: max_position_embeddings: .*": CONTEXT,
    r"config: hidden_act: dropped": DEFAULT,
    r"config: num_target_layers: expr off by one": "it only bounds the layer ids",
    r"config: mask_token_id: .*": "the one in dflash_config is read",
    r"config: (sliding_window|use_sliding_window): when true": "sliding layers read it",
    r"config: sliding_window: expr off by one": CONTAINS,
    r"config: enable_confidence_head: .*": "its presence decides a log line",
    r"refuse: config-invalid (conv_group_size|block_size"
    r"|markov_head_type|transformer_layer_config(\.(layer_types|model_type"
    r"|sliding_window|mask_token_id))?|dflash_config\.mask_token_id"
    r"|speculators_config\..*): dropped": NEVER,
    r"refuse: (mask-token-is-special|quantization-dropped|confidence-head-absent) .*": (
        INFORMS
    ),
    r"refuse: target-unsupported .*": "the server raises at the first draft of such a "
    "target, and no other export avoids it",
    r"refuse: reduced-vocabulary .*: dropped": NEVER,
    r"derived: .* embedding_scale != 1: when true": "by 1, which changes nothing",
    r"derived: markov_head\..*: (value|values|outside) other": UNREACHED,
    r"variables: conf_flag: .*": "there is no confidence head",
    r"variables: (M_layer|M_nested): source .*": NEVER,
    r"variables: (eos|bos|pad|target_type|leftover_quantization): .*": INFORMS,
    r"variables: (W|sliding_layers): absent other": NEVER,
}
RULES_OF = {
    DFLASH: {
        r"tensors: (d2t|t2d): (dropped|exists (negated|true)|shape off by one|kind)": (
            "a draft with a map is refused"
        ),
        r"config: vocab_size: .*": UNREAD,
    },
    DSPARK: {
        r"tensors: d2t: fate dropped": "a transform takes it all the same",
        r"tensors: t2d: exists true": "it is dropped in any case, and checked by value",
    },
}
