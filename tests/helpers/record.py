"""Results of long tests that the README's table shows.

``SPEC_EXPORT_RECORD=1`` makes the judge's and the engine's tests write what they found
to ``tests/results.json``; the README is made from that file, so no cell is typed.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[1] / "results.json"


def results() -> dict[str, dict[str, str]]:
    """What was recorded: test (``judge``, ``engine``) -> case -> result."""
    found: dict[str, dict[str, str]] = {"judge": {}, "engine": {}}
    if RESULTS.is_file():
        found |= json.loads(RESULTS.read_text())
    return found


def record(test: str, case: str, result: str) -> None:
    """Note a result, if results are being recorded."""
    if os.environ.get("SPEC_EXPORT_RECORD") != "1":
        return
    found = results()
    found[test][case] = result
    RESULTS.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
