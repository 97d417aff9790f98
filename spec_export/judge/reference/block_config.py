"""What SGLang's DFlash, DFlash2 and DSpark classes see of a ``config.json``.

Written from ``models/dflash.py``, ``models/dspark.py``, ``speculative/dflash_utils.py``
and ``dspark_components/dspark_config.py`` of 0.5.23 and from transformers'
``Qwen3Config``, which fills absent keys silently.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from spec_export.judge.reference.serving_config import (
    ReferenceUnsupported,
    Release,
    ServingError,
    dtype_name,
    parse_release,
    rope_dictionary,
)
from spec_export.judge.target import language_model

Family = Literal["dflash", "dflash2", "dspark"]

FAMILIES: dict[str, Family] = {
    "DFlashDraftModel": "dflash",
    "DFlash2DraftModel": "dflash2",
    "Qwen3DSparkModel": "dspark",
}
# First release that reads a thing; older ones ignore it silently.
SINCE: dict[str, Release] = {
    "dflash": (0, 5, 11, 0),
    "rope_base": (0, 5, 13, 0),  # before, it is 1e6 whatever the file says
    "windows": (0, 5, 14, 0),
    "dspark": (0, 5, 16, 0),
    "is_causal": (0, 5, 17, 0),
    "top_mask": (0, 5, 18, 0),
    "layer_count": (0, 5, 18, 0),  # of the target, from the ids where it is absent
    "slot_choice": (0, 5, 19, 0),
    "dflash2": (0, 5, 19, 0),
}
# transformers' Qwen3Config, for keys that config.json leaves out.
QWEN3_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
}


# Targets whose get_input_embeddings() is a Gemma3TextScaledWordEmbedding: the workers
# of block drafts call that module, so that a draft starts from scaled rows.
SCALED_EMBEDDINGS = (
    "Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration",
    "Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration",
)


def served_scale(target: Mapping[str, Any] | None) -> float:
    """The factor of the embedding rows that SGLang hands to block drafts.

    Args:
        target: The target's ``config.json``; None where it is not at hand.

    Raises:
        ServingError: another Gemma, which scales too: in that module or behind it.
    """
    name = "" if target is None else (target.get("architectures") or [""])[0]
    if target is None or name not in SCALED_EMBEDDINGS:
        if name.startswith("Gemma"):
            raise ServingError(f"how {name} scales its embedding was not looked at")
        return 1.0
    return math.sqrt(language_model(target)["hidden_size"])


@dataclass(frozen=True)
class BlockConfig:
    """The values that decide shapes and forward, as the release reads them.

    Attributes:
        queries: Rows of one forward: the anchor and mask tokens.
        first: The first row whose logits propose a token.
        windows: Per layer the largest distance of a visible key; None: all.
        causal: Per layer whether a row sees no later row of its block.
        rank: Of the Markov head or of the selector; 0 without one.
        head: Kind of Markov head.
        taps: Of the convolutions; 0 without them.
        group: Channels that share a kernel.
        top_k: Candidates that the selector reranks.
        confidence_with_markov: Whether the confidence head sees the token before.
        draft_vocab_size: Tokens that can be proposed; set when the weights are known.
    """

    family: Family
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_features: int
    vocab_size: int
    attention_bias: bool
    eps: float
    rope: dict[str, Any]
    rotary_dim: int
    neox: bool
    max_position: int
    dtype: str
    queries: int
    first: int
    mask_token: int
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    rank: int = 0
    head: str = "vanilla"
    taps: int = 0
    group: int = 1
    top_k: int = 0
    confidence_with_markov: bool = False
    draft_vocab_size: int = 0

    @property
    def proposals(self) -> int:
        """Tokens that one block proposes."""
        return self.queries - self.first


def made_up_layers(depth: int, layers: int) -> list[int]:
    """The target's layers that SGLang takes where config.json names none.

    Args:
        depth: Layers of the target.
        layers: Layers of the draft.

    Raises:
        ServingError: the target is too small for it.
    """
    if layers == 1:
        return [depth // 2]
    if depth < 4:
        raise ServingError(f"no target_layer_ids, and a target of {depth} layers")
    return [round(1 + k * (depth - 4) / (layers - 1)) for k in range(layers)]


def read_block_config(raw: Mapping[str, Any], release: str) -> BlockConfig:
    """Resolve a ``config.json`` as SGLang's block drafts of ``release`` do.

    Args:
        raw: The parsed file.
        release: SGLang release, for example ``"0.5.23"``.

    Raises:
        ServingError: SGLang raises while it builds the model.
        ReferenceUnsupported: the reference does not cover this.
    """
    number = parse_release(release)
    family = FAMILIES[raw["architectures"][0]]
    if number < SINCE[family]:
        raise ServingError(f"SGLang {release} has no {raw['architectures'][0]}")
    if not raw.get("model_type"):
        raise ServingError("config.json has no model_type: AutoConfig refuses it")
    if raw["model_type"] != "qwen3":
        raise ReferenceUnsupported(f"model_type {raw['model_type']!r}, not 'qwen3'")
    nested = raw.get("dflash_config") or {}

    def value(key: str) -> Any:
        return QWEN3_DEFAULTS[key] if raw.get(key) is None else raw[key]

    if (act := raw.get("hidden_act", "silu")) != "silu":
        raise ServingError(f"hidden_act {act!r}: the reference computes silu only")
    layers, max_position = (
        int(value("num_hidden_layers")),
        int(value("max_position_embeddings")),
    )
    depth = nested.get("num_target_layers", raw.get("num_target_layers"))
    ids = nested.get("target_layer_ids", raw.get("target_layer_ids"))
    if ids is not None and not ids:
        raise ServingError("target_layer_ids must be non-empty")
    if depth is None:
        uncounted = number < SINCE["layer_count"]
        depth = layers if ids is None or uncounted else max(ids) + 1
    if ids is None:
        ids = made_up_layers(int(depth), layers)
    if any(not 0 <= k < depth for k in ids):
        raise ServingError(f"target_layer_ids {ids} of a target of {depth} layers")
    queries, first = _block(raw, nested, family, number)
    windows, causal = _attention(raw, layers, number)
    rope = rope_dictionary(raw, number, max_position)
    if number < SINCE["rope_base"]:
        rope["rope_theta"] = 1e6
    return BlockConfig(
        family=family,
        hidden_size=int(value("hidden_size")),
        intermediate_size=int(value("intermediate_size")),
        num_layers=layers,
        num_heads=int(value("num_attention_heads")),
        num_kv_heads=int(value("num_key_value_heads")),
        head_dim=int(value("head_dim")),
        num_features=len(ids),
        vocab_size=int(value("vocab_size")),
        attention_bias=bool(raw.get("attention_bias")),
        eps=float(value("rms_norm_eps")),
        rope=rope,
        rotary_dim=int(value("head_dim")),
        neox=bool(raw.get("rope_is_neox_style", True)),
        max_position=max_position,
        dtype=dtype_name(raw, number),
        queries=queries,
        first=first,
        mask_token=_mask_token(raw, nested, number),
        windows=windows,
        causal=causal,
        **_extras(raw, nested, family),
    )


def _block(
    raw: Mapping[str, Any], nested: Mapping[str, Any], family: Family, number: Release
) -> tuple[int, int]:
    """Rows of a block and the first that proposes.

    DFLASH counts the anchor in ``block_size``, whose row proposes nothing; DSPARK
    counts proposals, and its anchor's row is one of them or comes on top.
    """
    size = nested.get("block_size", raw.get("block_size"))
    if family != "dspark":
        return int(16 if size is None else size), 1
    if size is None:
        raise ServingError("no block_size: DSpark could not resolve gamma")
    choice = raw.get("sample_from_anchor")
    from_anchor = choice is None or bool(choice) or number < SINCE["slot_choice"]
    return (int(size), 0) if from_anchor else (int(size) + 1, 1)


def _mask_token(
    raw: Mapping[str, Any], nested: Mapping[str, Any], number: Release
) -> int:
    top = raw.get("mask_token_id") if number >= SINCE["top_mask"] else None
    token = nested.get("mask_token_id", top)
    if token is None:
        raise ServingError("no mask_token_id: SGLang asks the tokenizer for <|MASK|>")
    return int(token)


def _attention(
    raw: Mapping[str, Any], layers: int, number: Release
) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Window and causality of each layer."""
    kinds = raw.get("layer_types") or ["full_attention"] * layers
    if number < SINCE["windows"]:
        kinds = ["full_attention"] * layers
    if len(kinds) < layers:
        raise ServingError(f"{len(kinds)} layer_types for {layers} layers")
    # Qwen3Config sets sliding_window to null without the switch.
    size = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    if "sliding_attention" in kinds and size is None:
        raise ServingError("sliding_attention layers require sliding_window")
    fixed = raw.get("is_causal") if number >= SINCE["is_causal"] else None
    slides = [kind == "sliding_attention" for kind in kinds[:layers]]
    return (
        tuple(int(size or 0) - 1 if slide else None for slide in slides),
        tuple(slide if fixed is None else bool(fixed) for slide in slides),
    )


def _extras(
    raw: Mapping[str, Any], nested: Mapping[str, Any], family: Family
) -> dict[str, Any]:
    """What only DFlash2 (in ``dflash_config``) or DSpark (at the top) reads."""
    if family == "dspark":
        if int(raw.get("markov_rank") or 0) <= 0:
            raise ServingError("DSpark requires markov_rank > 0 at the top level")
        head = raw.get("markov_head_type", nested.get("markov_head_type"))
        if head is None:
            raise ServingError("DSpark requires markov_head_type")
        if head not in ("vanilla", "gated", "rnn"):
            raise ServingError(f"unsupported markov_head_type {head!r}")
        with_markov = bool(raw.get("confidence_head_with_markov", True))
        rank = int(raw["markov_rank"])
        return {"rank": rank, "head": head, "confidence_with_markov": with_markov}
    taps, group = nested.get("conv_kernel_size", 0), nested.get("conv_group_size", 0)
    if bool(taps) != bool(group):
        raise ServingError("conv_kernel_size and conv_group_size go together")
    rank, top = nested.get("selector_rank", 0), nested.get("selector_top_k", 0)
    if family == "dflash2" and not (rank and top):
        raise ServingError("DFlash2 requires dflash_config.selector_rank and _top_k")
    if family == "dflash":
        rank = top = 0
    return {"taps": taps, "group": group or 1, "rank": rank, "top_k": top}
