"""RoPE settings: from transformers' spelling to one that every SGLang reads alike.

transformers 5 keeps one ``rope_parameters`` mapping; releases of SGLang before
0.5.10 read ``rope_theta`` and ``rope_scaling`` only, later ones read the mapping,
so both are written. Rules: srt/layers/rotary_embedding/factory.py and yarn.py of
0.5.23, modeling_rope_utils.py of transformers 5.19.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

# Per type: the keys that both sides read with the same meaning.
_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "truncate",
    ),
}
_REQUIRED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
# Left by multimodal targets; the draft was trained with 1-D positions, so they
# have to go or SGLang rotates by 3-D positions.
_MROPE = ("mrope_section", "mrope_interleaved", "mrope_interleaved_glm", "video_rope")
_KNOWN = {"rope_type", "type", "rope_theta", "attention_factor", "mscale"} | {
    "mscale_all_dim",
    "partial_rotary_factor",
    *_MROPE,
}


class RopeError(ValueError):
    """RoPE settings that SGLang would compute differently."""


def rope_settings(layer: Mapping[str, Any]) -> dict[str, Any]:
    """The RoPE settings of a decoder config in transformers 5's form.

    Args:
        layer: ``transformer_layer_config``, with ``rope_parameters`` or with the
            older ``rope_theta`` and ``rope_scaling``.

    Returns:
        A mapping with at least ``rope_type`` and ``rope_theta``.

    Raises:
        RopeError: if ``rope_theta`` is not known or a value has the wrong type.
    """
    given = layer.get("rope_parameters")
    if given is None:
        given = layer.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise RopeError(f"{given!r} is not a mapping")
    settings = dict(given)
    # A target with one RoPE per layer type: speculators trains with the sliding
    # variant (models/utils.py, flatten_rope_parameters).
    if isinstance(settings.get("sliding_attention"), Mapping):
        settings = dict(settings["sliding_attention"])
    nested = [key for key, value in settings.items() if isinstance(value, Mapping)]
    if nested:
        raise RopeError(f"rope_parameters.{nested[0]} is for one layer type only")
    settings["rope_type"] = settings.get("rope_type") or settings.get("type", "default")
    if settings["rope_type"] == "mrope":
        settings["rope_type"] = "default"
    if settings.get("rope_theta") is None:
        # No default: transformers' depends on the model class.
        settings["rope_theta"] = layer.get("rope_theta")
    _number(settings, "rope_theta")
    if settings.get("partial_rotary_factor") is None:
        settings["partial_rotary_factor"] = layer.get("partial_rotary_factor")
    # transformers prefers the one beside rope_parameters (Phi-3 has it there).
    outer = layer.get("original_max_position_embeddings")
    if outer is not None and settings["rope_type"] in ("llama3", "yarn"):
        settings["original_max_position_embeddings"] = outer
    return settings


def _number(settings: Mapping[str, Any], key: str) -> float:
    """A positive, finite number of the settings."""
    value = settings.get(key)
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not abs(value) <= sys.float_info.max
        or value <= 0
    ):
        raise RopeError(f"{key} is {value!r}, not a positive number")
    return float(value)


def write_rope(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Both spellings of the RoPE settings, equal in every reader.

    Args:
        layer: ``transformer_layer_config`` of the source.

    Returns:
        ``rope_theta``, ``rope_parameters`` and, unless the type is default,
        ``rope_scaling`` for config.json.

    Raises:
        RopeError: when no spelling makes SGLang compute what was trained.
    """
    settings = rope_settings(layer)
    kind = settings["rope_type"]
    if kind not in _KEYS:
        raise RopeError(
            f"rope_type {kind!r}: transformers and SGLang compute it differently "
            f"(exact are {', '.join(_KEYS)})"
        )
    partial = settings.get("partial_rotary_factor")
    if partial is not None and partial != 1.0:
        raise RopeError(
            f"partial_rotary_factor {partial}: SGLang ignores it inside rope_parameters"
        )
    unknown = sorted(set(settings) - _KNOWN - set(_KEYS[kind]))
    # A key of another type is harmless in transformers, but says that someone
    # expected it to act.
    unknown = [k for k in unknown if settings[k] is not None]
    if unknown and kind != "default":
        raise RopeError(f"rope_parameters.{unknown[0]} is not read by SGLang")
    for key in _REQUIRED.get(kind, ()):
        _number(settings, key)
    scaling = {k: settings[k] for k in _KEYS[kind] if settings.get(k) is not None}
    for key in scaling:
        if key != "truncate":
            _number(settings, key)
    if "factor" in scaling:
        # SGLang's linear scaling takes an integer for a list of factors and fails.
        scaling["factor"] = float(scaling["factor"])
    if kind == "yarn":
        scaling = _yarn(layer, settings, scaling)
    if kind == "llama3":
        scaling.setdefault(
            "original_max_position_embeddings", _max_positions(layer, settings)
        )
    theta = settings["rope_theta"]
    out: dict[str, Any] = {
        "rope_theta": theta,
        "rope_parameters": {"rope_type": kind, "rope_theta": theta, **scaling},
    }
    if kind != "default":
        out["rope_scaling"] = {"rope_type": kind, "type": kind, **scaling}
    return out


def _max_positions(layer: Mapping[str, Any], settings: Mapping[str, Any]) -> int:
    value = settings.get("original_max_position_embeddings") or layer.get(
        "max_position_embeddings"
    )
    if not isinstance(value, int):
        raise RopeError("original_max_position_embeddings is not known")
    return value


def _yarn(
    layer: Mapping[str, Any], settings: Mapping[str, Any], scaling: dict[str, Any]
) -> dict[str, Any]:
    """YaRN's attention factor as SGLang's ``attn_factor``.

    transformers multiplies cos and sin by ``attention_factor`` (or derives it from
    mscale); SGLang multiplies by ``attn_factor * (0.1 ln(factor) + 1)`` and does
    not read ``attention_factor``; releases differ in mscale, so it is folded in.
    """
    scaling["original_max_position_embeddings"] = _max_positions(layer, settings)
    factor = float(scaling["factor"])

    def magnitude(mscale: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    wanted = magnitude()
    if settings.get("attention_factor") is not None:
        wanted = _number(settings, "attention_factor")
    elif settings.get("mscale") and settings.get("mscale_all_dim"):
        top, bottom = _number(settings, "mscale"), _number(settings, "mscale_all_dim")
        wanted = magnitude(top) / magnitude(bottom)
    ratio = wanted / magnitude()
    if ratio != 1.0:
        scaling["attention_factor"] = wanted
        scaling["attn_factor"] = ratio
    return scaling
