"""What SGLang's EAGLE-3 class sees of a ``config.json``, release by release.

Written from SGLang's sources (``models/llama_eagle3.py``, ``models/llama.py``) and
from the defaults of transformers' ``LlamaConfig``, which fill absent keys silently.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Release = tuple[int, int, int, int]


class ServingError(ValueError):
    """SGLang would refuse this folder when it loads it."""


class ReferenceUnsupported(ValueError):
    """SGLang may serve this, but the reference does not compute it."""


OLDEST: Release = (0, 4, 5, 0)

# First release that reads a thing; older ones ignore it silently.
SINCE: dict[str, Release] = {
    "fc_without_bias": (0, 4, 9, 0),
    "layer_names": (0, 5, 12, 0),
    "many_layers": (0, 5, 12, 0),
    "num_aux": (0, 5, 12, 0),
    "fc_norm": (0, 5, 12, 0),
    "norm_output": (0, 5, 12, 0),
    "window": (0, 5, 12, 0),
    "norm_before_fc": (0, 5, 17, 0),
    "target_head": (0, 5, 2, 0),
    "rope_parameters": (0, 5, 10, 0),
    "dtype_key": (0, 5, 4, 1),
    "cropped": (0, 5, 4, 2),
}
# transformers 5.0.0rc0 under a model that read the older spelling only.
ROPE_LOST: Release = (0, 5, 6, 1)

# transformers' LlamaConfig, for keys that config.json leaves out.
LLAMA_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
}


def parse_release(release: str) -> Release:
    """``"0.5.10.post1"`` -> ``(0, 5, 10, 1)``.

    Raises:
        ValueError: not a release number.
    """
    match = re.match(r"(\d+)\.(\d+)\.(\d+)(?:\.post(\d+))?", release)
    if match is None:
        raise ValueError(f"not an SGLang release: {release!r}")
    major, minor, patch, post = match.groups()
    return int(major), int(minor), int(patch), int(post or 0)


@dataclass(frozen=True)
class ServingConfig:
    """The values that decide shapes and forward, already as the release reads them.

    Attributes:
        rope: Effective RoPE dictionary, ``rope_theta`` and ``rope_type`` included.
        dtype: Name of the parameters' dtype (``float16`` where config.json has none).
        draft_vocab_size: Rows of the head; the target's vocabulary where null.
        head_from_target: ``draft_vocab_size`` is null, so that SGLang puts the
            target's head in.
        shares_embedding: SGLang replaces ``embed_tokens`` by the target's.
        window: Keys further back than this are not seen (``window_left``); None: all.
        layer_windows: Per layer, for the plug-in's class; None: ``window`` for all.
        always_fc: The class applies ``fc`` whatever the width of the features.
    """

    release: Release
    hidden_size: int
    target_width: int
    num_aux: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    draft_vocab_size: int
    head_from_target: bool
    tied: bool
    shares_embedding: bool
    eps: float
    fc_bias: bool
    o_bias: bool
    input_norm: bool
    fc_norm: bool
    norm_output: bool
    rope: dict[str, Any]
    rotary_dim: int
    neox: bool
    max_position: int
    dtype: str
    window: int | None
    qkv_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_before_residual: bool = False
    layer_windows: tuple[int | None, ...] | None = None
    always_fc: bool = False

    def has(self, feature: str) -> bool:
        """Whether the release reads a feature of ``SINCE``."""
        return self.release >= SINCE[feature]


def rope_dictionary(
    raw: Mapping[str, Any], release: Release, max_position: int
) -> dict[str, Any]:
    """The RoPE dictionary that the class reads.

    transformers 5 lets ``rope_scaling`` win over ``rope_parameters`` and fills in the
    top-level ``rope_theta``; releases before 0.5.10 read the older spelling only.
    """
    original = raw.get("original_max_position_embeddings")
    if release == ROPE_LOST:
        return {"rope_theta": 10000.0, "rope_type": "default"}
    if release >= SINCE["rope_parameters"]:
        rope = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    else:
        rope = dict(raw.get("rope_scaling") or {})
        rope.pop("rope_theta", None)
    theta = raw.get("rope_theta")
    rope.setdefault("rope_theta", 10000.0 if theta is None else theta)
    rope.setdefault("rope_type", rope.get("type", "default"))
    if original:
        rope["original_max_position_embeddings"] = original
    elif rope["rope_type"] in ("llama3", "yarn", "longrope"):
        rope.setdefault("original_max_position_embeddings", max_position)
    return rope


def dtype_name(raw: Mapping[str, Any], release: Release) -> str:
    """The dtype of ``--dtype auto``; absent means float32, which becomes float16."""
    newer = release >= SINCE["dtype_key"]
    for key in ("dtype", "torch_dtype") if newer else ("torch_dtype",):
        if raw.get(key) is not None:
            return str(raw[key]).removeprefix("torch.")
    return "float16"


def read_config(
    raw: Mapping[str, Any], release: str, *, window: int | None, plugin: bool = False
) -> ServingConfig:
    """Resolve a ``config.json`` as SGLang's EAGLE-3 class of ``release`` does.

    Args:
        raw: The parsed file.
        release: SGLang release, for example ``"0.5.23"``.
        window: ``--speculative-draft-window-size``, None without the flag.
        plugin: Read the extra keys of the plug-in's class too.

    Raises:
        ServingError: SGLang raises while it builds the model.
        ReferenceUnsupported: the reference does not cover this.
    """
    number = parse_release(release)
    if number < OLDEST:
        raise ReferenceUnsupported(f"the reference starts at 0.4.5, not {release}")
    if plugin and number < SINCE["many_layers"]:
        raise ServingError(f"the plug-in's class builds on 0.5.12, not {release}")
    if not raw.get("model_type"):
        raise ServingError("config.json has no model_type: AutoConfig refuses it")
    if raw["model_type"] not in ("llama", "llama4_text"):
        raise ReferenceUnsupported(
            f"model_type {raw['model_type']!r}: the reference knows the defaults of "
            "'llama' only"
        )

    def value(key: str) -> Any:
        return LLAMA_DEFAULTS[key] if raw.get(key) is None else raw[key]

    def flag(key: str, since: str | None = None) -> bool:
        return bool(raw.get(key)) and (since is None or number >= SINCE[since])

    if window is not None and window < 1:
        raise ServingError(f"--speculative-draft-window-size {window}: ValueError")
    eagle = raw.get("eagle_config") or {}
    if not isinstance(eagle, Mapping):
        raise ServingError("eagle_config is not an object")
    hidden = int(value("hidden_size"))
    heads = int(value("num_attention_heads"))
    layers = int(value("num_hidden_layers"))
    head_dim = int(raw.get("head_dim") or hidden // heads)
    if (act := raw.get("hidden_act", "silu")) != "silu":
        raise ServingError(f"hidden_act {act!r}: only silu is supported")
    if layers != 1 and number < SINCE["many_layers"]:
        raise ServingError(f"{layers} layers: EAGLE-3 supports one before 0.5.12")
    if "draft_vocab_size" not in raw:
        raise ServingError("draft_vocab_size is absent: AttributeError")
    tied = bool(value("tie_word_embeddings"))
    draft_vocab = raw["draft_vocab_size"]
    from_target = draft_vocab is None and not tied
    if draft_vocab is None and (tied or number < SINCE["target_head"]):
        raise ServingError("draft_vocab_size is null: TypeError")
    padded = draft_vocab is not None and int(draft_vocab) % 64 and not tied
    if padded and draft_vocab != raw.get("vocab_size") and number < SINCE["cropped"]:
        raise ServingError(
            f"a head of {draft_vocab} rows, no multiple of 64: its padding shows among "
            "the logits before 0.5.4.post2"
        )
    if "target_hidden_size" in raw and raw["target_hidden_size"] is None:
        raise ServingError("target_hidden_size is null: TypeError")
    target_width = int(raw.get("target_hidden_size", hidden))
    ids = eagle.get("eagle_aux_hidden_state_layer_ids")
    num_aux = raw.get("num_aux_hidden_states") or (len(ids) if ids else 3)
    norm_before_fc = bool(eagle.get("norm_before_fc", raw.get("norm_before_fc", False)))
    vocab = int(value("vocab_size"))
    max_position = int(value("max_position_embeddings"))
    rope = rope_dictionary(raw, number, max_position)
    if "mrope_section" in rope:
        raise ReferenceUnsupported("mrope_section: 3-D positions are not computed")
    partial = raw.get("partial_rotary_factor")
    width = "intermediate_size"
    if raw["model_type"] == "llama4_text":
        width = "intermediate_size_mlp"
    return ServingConfig(
        release=number,
        hidden_size=hidden,
        target_width=target_width,
        num_aux=int(num_aux) if number >= SINCE["num_aux"] else 3,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        intermediate_size=int(raw[width] if width in raw else value(width)),
        vocab_size=vocab,
        draft_vocab_size=vocab if draft_vocab is None else int(draft_vocab),
        head_from_target=from_target,
        tied=tied,
        shares_embedding=target_width == hidden or "target_hidden_size" not in raw,
        eps=float(value("rms_norm_eps")),
        fc_bias=flag("bias") or number < SINCE["fc_without_bias"],
        o_bias=flag("attention_bias") or flag("bias"),
        # The plug-in's class has an input_norm of its own.
        input_norm=norm_before_fc and (plugin or number >= SINCE["norm_before_fc"]),
        fc_norm=flag("fc_norm", "fc_norm") or flag("use_aux_norm", "fc_norm"),
        norm_output=flag("norm_output", "norm_output"),
        rope=rope,
        rotary_dim=int((1 if partial is None else partial) * head_dim),
        neox=bool(raw.get("rope_is_neox_style", True)),
        max_position=max_position,
        dtype=dtype_name(raw, number),
        window=window if number >= SINCE["window"] else None,
        **(_plugin_fields(raw, layers) if plugin else {}),
    )


def _plugin_fields(raw: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The keys that only the plug-in's class reads, all at the top level."""
    kinds = raw.get("layer_types") or ["full_attention"] * layers
    size = int(raw.get("sliding_window") or 0)
    if len(kinds) != layers:
        raise ServingError(f"{len(kinds)} layer_types for {layers} layers")
    if "sliding_attention" in kinds and not size:
        raise ServingError("layer_types has sliding_attention, but no sliding_window")
    return {
        "qkv_bias": bool(raw.get("attention_bias")),
        "mlp_bias": bool(raw.get("mlp_bias")),
        "qk_norm": bool(raw.get("qk_norm")),
        "norm_before_residual": bool(raw.get("norm_before_residual")),
        # speculators counts the query itself, ``window_left`` does not.
        "layer_windows": tuple(
            size - 1 if kind == "sliding_attention" else None for kind in kinds
        ),
        "always_fc": True,
    }
