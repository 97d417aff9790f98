"""RoPE of targets whose configuration class in SGLang reads transformers 4's spelling.

transformers 5 saves one ``rope_parameters`` mapping. SGLang's own ``Qwen3NextConfig``
(srt/configs/qwen3_next.py, 0.5.2 to 0.5.23) reads ``rope_theta``,
``partial_rotary_factor`` and ``rope_scaling`` beside it and nothing in it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from spec_export.findings import Finding, error
from spec_export.layout.targets import OlderRope, language_model, target_classes

_BESIDE = ("rope_theta", "partial_rotary_factor")


def older_rope(rope: Any) -> dict[str, Any]:
    """``rope_parameters`` in the older spelling; empty for what is no mapping."""
    if not isinstance(rope, Mapping):
        return {}
    out = {key: rope[key] for key in _BESIDE if rope.get(key) is not None}
    if rope.get("rope_type", "default") != "default":
        out["rope_scaling"] = {k: v for k, v in rope.items() if k not in _BESIDE}
    return out


def older_rope_only(config: Mapping[str, Any]) -> OlderRope | None:
    """What is known of SGLang's class, if it reads only the older spelling.

    Args:
        config: A target's ``config.json``.
    """
    named = config.get("architectures")
    names = named if isinstance(named, list) and named else [None]
    known = target_classes().get(str(names[0]))
    return known.older_rope if known is not None else None


def unread_rope(config: Mapping[str, Any]) -> list[Finding]:
    """Whether SGLang would serve a target with another RoPE than its own.

    Args:
        config: The target's ``config.json``.
    """
    text, known = language_model(config), older_rope_only(config)
    wanted = older_rope(text.get("rope_parameters"))
    if known is None or not wanted:
        return []
    name, write = config["architectures"][0], json.dumps(wanted)[1:-1]
    subject = "target config.json rope_parameters"
    allow = "; where the servers' copy says so already, --allow target-rope-unread"
    kind = wanted.get("rope_scaling", {}).get("rope_type", "default")
    if kind in known.fails:
        return [
            error(
                "target-rope-unread",
                subject,
                f"has the type {kind}, on which SGLang's configuration class of {name} "
                "fails: the server does not start (one before "
                f"{known.fails_since} passes over it)",
                f"in the target's config.json write {write} instead of it{allow}",
            )
        ]
    taken = {key: text.get(key, known.defaults.get(key)) for key in wanted}
    if taken == wanted:
        return []
    return [
        error(
            "target-rope-unread",
            subject,
            f"is not read by SGLang's configuration class of {name}: the target would "
            f"be served with {json.dumps(taken)[1:-1]} instead of {write}",
            f"in the target's config.json write {write} beside it{allow}",
        )
    ]
