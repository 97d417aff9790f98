"""In which dtypes a server computes draft and target unless it is told.

``--dtype auto`` looks at each of the two for itself. Where they differ the server stops
at the first draft forward: "expected m1 and m2 to have the same dtype" (run with SGLang
0.5.23, a bfloat16 target and a float32 draft).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spec_export.findings import Finding, warning
from spec_export.layout.releases import float32_loads_as
from spec_export.layout.targets import language_model

FLAG = "--dtype"


def auto_dtype(config: Mapping[str, Any]) -> str | None:
    """What ``--dtype auto`` makes of a config.json; None where it does not say."""
    parts, keys = (language_model(config), config), ("dtype", "torch_dtype")
    saved = next((part[k] for part in parts for k in keys if part.get(k)), None)
    if not isinstance(saved, str) or saved != "float32":
        return saved if isinstance(saved, str) else None
    kind = next((p["model_type"] for p in parts if p.get("model_type")), "")
    return float32_loads_as(str(kind))


def dtype_flag(
    draft: Mapping[str, Any], target: Mapping[str, Any]
) -> tuple[list[str], list[Finding]]:
    """What a launch line needs for both to be computed in one dtype.

    Args:
        draft: config.json of the export.
        target: That of the target.

    Returns:
        Server arguments, the dtype of the target; and a warning that says why. Both
        empty where ``auto`` does it, or where one of the two does not say.
    """
    mine, theirs = auto_dtype(draft), auto_dtype(target)
    if mine is None or theirs is None or mine == theirs:
        return [], []
    argv = [FLAG, theirs]
    saved = draft.get("dtype") or draft.get("torch_dtype")
    as_saved = mine if saved in (mine, None) else f"{mine} (saved in {saved})"
    return argv, [
        warning(
            "dtype-differs",
            "dtype",
            f"by itself SGLang computes the draft in {as_saved} and the target in "
            f"{theirs}, and stops at the first draft",
            f"start the server with {' '.join(argv)}, or export with --dtype {theirs}",
        )
    ]
