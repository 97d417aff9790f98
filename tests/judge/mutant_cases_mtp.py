"""MTP heads that exercise every rule of their templates."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from mutants import Case, changed, unrounded
from safetensors.torch import load_file
from survivors import (
    COMMON,
    CONTEXT,
    DEFAULT,
    DEMANDS,
    INFORMS,
    LAUNCH,
    NEVER,
    STEPS,
    UNREAD,
)

from spec_export.judge import training_module
from tests.helpers import mtp as helper

NEXT, DENSE = "mtp-qwen3_next", "mtp-qwen3_5"
TEMPLATES = [NEXT, DENSE]
# Values whose absence or change shows.
STRONG = {
    "head_dim": 16,
    "rms_norm_eps": 1e-2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 50.0,
        "partial_rotary_factor": 0.5,
    },
}
QUANTISED = {"quantization_config": {"quant_method": "fp8"}}
MOE = {"norm_topk_prob": False}
ALLOWED = ("mtp-first-step",)


def case(
    name: str,
    template: str,
    kind: str,
    source: Any = (),
    target: Any = (),
    sizes: Any = (),
    whole: bool = False,
    **more: Any,
) -> Case:
    """A case of a head that speculators saved; its values become float32.

    ``whole``: the source has its copies of the target's tensors too.
    """
    with (
        tempfile.TemporaryDirectory() as made,
        patch.dict(helper.SIZES, STRONG | dict(sizes)),
        patch.dict(helper.MOE, MOE if kind == "qwen3_next" else {}),
    ):
        place = helper.make_target(Path(made) / "target", kind)
        folder = helper.make_mtp(Path(made) / "draft", place, kind)
        config = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        weights = {name: unrounded(value) for name, value in tensors.items()}
        lent = load_file(place / "model.safetensors")
        about = changed(json.loads((place / "config.json").read_text()), dict(target))
    shared = {
        "embed_tokens.weight": _ending(lent, "embed_tokens.weight"),
        "lm_head.weight": _ending(lent, "lm_head.weight"),
    }
    both = weights | shared
    if whole:
        both["verifier_lm_head.weight"] = shared["lm_head.weight"]
    return Case(
        name,
        template,
        training_module(config, both.__getitem__, list(both)),
        changed(config, dict(source)),
        both,
        shared["embed_tokens.weight"],
        shared["lm_head.weight"],
        about,
        slim=() if whole else tuple(shared),
        **{"allow": ALLOWED, **more},
    )


def _ending(tensors: dict[str, torch.Tensor], ending: str) -> torch.Tensor:
    return next(v for k, v in tensors.items() if k.endswith(ending)).float()


def cases() -> list[Case]:
    layer = "transformer_layer_config"
    sparse = dict.fromkeys(
        [
            *(
                f"{layer}.{k}"
                for k in ("num_key_value_heads", "head_dim", "hidden_act")
            ),
            "num_nextn_predict_layers",
        ],
        ...,
    )
    return [
        case("experts", NEXT, "qwen3_next"),
        case("of others", NEXT, "qwen3_5_moe_text", refused=True),
        case("dense", DENSE, "qwen3_5_text", whole=True),
        case(
            "nested",
            DENSE,
            "qwen3_5_moe_text",
            target={"text_config.dtype": "bfloat16", **QUANTISED},
        ),
        case(
            "sparse",
            DENSE,
            "qwen3_5_text",
            source=sparse,
            target={"dtype": ...},
            sizes={"num_key_value_heads": 4, "head_dim": 8},
        ),
        case("gelu", DENSE, "qwen3_5_text", sizes={"hidden_act": "gelu"}, refused=True),
    ]


BESIDE = "SGLang's own configuration class reads the key beside"
TEXT = r"(text_config\.)?"
WRITTEN = {
    TEXT + r"(attention_bias|attention_dropout|decoder_sparse_step|initializer_range"
    r"|layer_types|linear_\w+|mlp_only_layers|num_hidden_layers|output_router_logits"
    r"|router_aux_loss_coef|transformers_version|use_cache): .*": UNREAD
    + ": one layer, always with full attention and, where there are any, experts",
    TEXT + r"(bos|eos|pad)_token_id: .*": UNREAD,
    TEXT + r"intermediate_size: .*": "experts have widths of their own",
    TEXT + r"max_position_embeddings: .*": CONTEXT,
    TEXT + r"vocab_size: (off by one|stale)": "embedding and head are the target's, "
    "and a larger size crops no logit",
    TEXT + r"(hidden_act|norm_topk_prob): dropped": DEFAULT,
    TEXT + r"tie_word_embeddings: (dropped|null)": DEFAULT,
    TEXT + r"dtype: (dropped|null)": "torch_dtype, or the whole file's dtype, says it",
    r"torch_dtype: .*": "dtype says it, and releases with MTP for it read that",
    TEXT + r"rope_parameters\.partial_rotary_factor: .*": BESIDE,
    TEXT + r"rope_parameters\.rope_type: dropped": DEFAULT,
    TEXT
    + r"partial_rotary_factor: stale": "a tenth more is the same number of channels",
    **LAUNCH,
}
WRITTEN_OF = {
    NEXT: {
        r"rope_parameters\.(rope_theta|rope_type): .*": BESIDE,
        r"tie_word_embeddings: wrong flag": "the class takes both from the target",
        r"norm_topk_prob: null": "as false, which is written",
    },
    DENSE: {
        TEXT + r"(rope_theta: .*|rope_parameters\.rope_theta: dropped)": "the other of "
        "the two says the same",
        r"text_config\.model_type: dropped": "the class of the text model says it",
    },
}
RULES = {
    **COMMON,
    **STEPS,
    r"parameters: lm_head\.weight: .*": COMMON[r"parameters: embed_tokens\.weight: .*"],
    r"refuse: config-invalid num_nextn_predict_layers: dropped": NEVER,
    r"tensors: .*experts\..*: fate dropped": "a transform takes it all the same",
    r"(derived|parameters): .*experts\..*: (when|exists) true": "no experts, no names",
    r"flags: .*unquant'\]: since (lower|dropped)": "an older server does not know the "
    "flag and does not start",
    r"serves: architecture .*": "config.json names the target's class, in whose place "
    "SGLang puts its own",
    r"variables: DV: .*": INFORMS,
    r"variables: heads: .*": NEVER,
    r"variables: (I|MI|SI|E): absent (dropped|other)": "sizes that this head lacks",
    r"variables: target_class: absent .*": "every target names its class",
}
RULES_OF = {DENSE: {r"serves: layers (dropped|all)": DEMANDS}}
