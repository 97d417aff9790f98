"""MTP heads that exercise every rule of their templates."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import survivors as why
from mutants import QUANTISED, Case, case_of_saved

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
MOE = {"norm_topk_prob": False}
ALLOWED = (helper.FIRST_STEP, "target-rope-unread")


def case(
    name: str,
    template: str,
    kind: str,
    target: Any = (),
    sizes: Any = (),
    whole: bool = False,
    **more: Any,
) -> Case:
    """A case of a head; ``whole``: the source has its copy of the target's head."""
    with (
        tempfile.TemporaryDirectory() as made,
        patch.dict(helper.SIZES, STRONG | dict(sizes)),
        patch.dict(helper.MOE, MOE if kind == "qwen3_next" else {}),
    ):
        place = helper.make_target(Path(made) / "target", kind)
        folder = helper.make_mtp(Path(made) / "draft", place, kind)
        more["copies"] = ("verifier_lm_head.weight",) if whole else ()
        return case_of_saved(
            name, template, folder, place, about=target, allow=ALLOWED, **more
        )


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
    r"|router_aux_loss_coef|transformers_version|use_cache): .*": why.UNREAD
    + ": one layer, always with full attention and, where there are any, experts",
    TEXT + r"(bos|eos|pad)_token_id: .*": why.UNREAD,
    TEXT + r"intermediate_size: .*": "experts have widths of their own",
    TEXT + r"max_position_embeddings: .*": why.CONTEXT,
    TEXT + r"vocab_size: (off by one|stale)": "embedding and head are the target's, "
    "and a larger size crops no logit",
    TEXT + r"(hidden_act|norm_topk_prob): dropped": why.DEFAULT,
    TEXT + r"tie_word_embeddings: (dropped|null)": why.DEFAULT,
    TEXT + r"dtype: (dropped|null)": "torch_dtype, or the whole file's dtype, says it",
    r"torch_dtype: .*": "dtype says it, and releases with MTP for it read that",
    TEXT + r"rope_parameters\.partial_rotary_factor: .*": BESIDE,
    TEXT + r"rope_parameters\.rope_type: dropped": why.DEFAULT,
    TEXT
    + r"partial_rotary_factor: stale": "a tenth more is the same number of channels",
    **why.LAUNCH,
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
    **why.COMMON,
    **why.HEAD,
    **why.STEPS,
    r"refuse: config-invalid num_nextn_predict_layers: dropped": why.NEVER,
    r"tensors: .*experts\..*: fate dropped": "a transform takes it all the same",
    r"(derived|parameters): .*experts\..*: (when|exists) true": "no experts, no names",
    r"flags: .*unquant'\]: since (lower|dropped)": "an older server does not know the "
    "flag and does not start",
    r"serves: architecture .*": "config.json names the target's class, in whose place "
    "SGLang puts its own",
    r"variables: DV: .*": why.INFORMS,
    r"variables: heads: .*": why.NEVER,
    r"variables: (I|MI|SI|E): absent (dropped|other)": "sizes that this head lacks",
    r"variables: target_class: absent .*": "every target names its class",
}
RULES_OF = {DENSE: {r"serves: layers (dropped|all)": why.DEMANDS}}
