"""The forward comparison: does SGLang compute from an export what was trained?

Three legs (``Leg``), each reported apart: *cast* (the live module against the same
at the saved dtype), *layout* (the training module against a serving reference that
reads only the export folder) and *engine* (the real SGLang, in its own processes).

This room imports neither ``layout`` nor ``artifact`` nor ``export``: it writes down
SGLang's loading rules and forward a second time, so that a mistake made there cannot
cancel out here. Importing it costs no torch; the functions below do.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from spec_export.judge.verdict import Leg, StepMetrics, Tolerance, not_run

if TYPE_CHECKING:
    from spec_export.judge.cast import cast_leg
    from spec_export.judge.engine.leg import engine_leg
    from spec_export.judge.probe import (
        Inputs,
        Probe,
        load_probe,
        save_probe,
        training_logits,
        training_module,
    )
    from spec_export.judge.run import layout_leg, probe_leg

__all__ = [
    "Inputs",
    "Leg",
    "Probe",
    "StepMetrics",
    "Tolerance",
    "cast_leg",
    "engine_leg",
    "layout_leg",
    "load_probe",
    "not_run",
    "probe_leg",
    "save_probe",
    "training_logits",
    "training_module",
]

_HOME = {
    "engine_leg": "engine.leg",
    "cast_leg": "cast",
    **dict.fromkeys(("layout_leg", "probe_leg"), "run"),
    **dict.fromkeys(
        (
            "Inputs",
            "Probe",
            "load_probe",
            "save_probe",
            "training_logits",
            "training_module",
        ),
        "probe",
    ),
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
