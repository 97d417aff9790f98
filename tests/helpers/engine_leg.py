"""The target's answers, asked for once: its process takes seconds to start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spec_export.judge.engine import leg

_LOOKED: dict[Any, Any] = {}


def look_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same question to the same target has the same answer."""
    real = leg.look_at_target

    def look(target: Path, prompts: Any, served: Any, *more: Any) -> Any:
        side, *rest = more
        tokens = [one.output_ids for one in served]
        key = json.dumps([str(target), prompts, tokens, side.layers, *rest[:3]])
        if key not in _LOOKED:
            _LOOKED[key] = real(target, prompts, served, *more)
        return _LOOKED[key]

    monkeypatch.setattr(leg, "look_at_target", look)
