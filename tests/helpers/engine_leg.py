"""Leg *engine* in tests: how SGLang is set up, and the target's answers, asked once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spec_export.judge.engine import leg
from spec_export.judge.engine.host import Setup
from spec_export.layout.releases import engine_setup

ON_CPU, ON_CUDA = (Setup(**engine_setup(device)) for device in ("cpu", "cuda"))
_LOOKED: dict[Any, Any] = {}


def look_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same question to the same target has the same answer.

    Its process takes seconds to start.
    """
    real = leg.look_at_target

    def look(target: Path, prompts: Any, served: Any, *more: Any) -> Any:
        side, *rest = more
        tokens = [one.output_ids for one in served]
        key = json.dumps([str(target), prompts, tokens, side.layers, *rest[:3]])
        if key not in _LOOKED:
            _LOOKED[key] = real(target, prompts, served, *more)
        return _LOOKED[key]

    monkeypatch.setattr(leg, "look_at_target", look)
