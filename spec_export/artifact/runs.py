"""What trainings leave in an output_dir beside their exports: one state file each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spec_export.artifact.hidden import lives
from spec_export.findings import Finding, error, warning

_PREFIX, _SUFFIX = ".spec_export_run-", ".json"


def state_path(output_dir: Path, training: str) -> Path:
    """The state file of one training, so that two do not share one.

    Args:
        output_dir: Where its exports are.
        training: Its identity, hexadecimal.
    """
    return output_dir / f"{_PREFIX}{training[:16]}{_SUFFIX}"


def failed_exports(output_dir: Path, run_id: str, chosen: Path) -> list[Finding]:
    """``export-error`` for each export of a run that failed and was not made good.

    A warning only where a training that goes on is still writing it.

    Args:
        output_dir: Of the callback.
        run_id: The run that ``chosen`` belongs to.
        chosen: The export that would be taken instead.
    """
    findings = []
    for path in sorted(output_dir.glob(f"{_PREFIX}*{_SUFFIX}")):
        state = _read(path)
        if state.get("run_id") != run_id:
            continue
        for failure in state.get("failed") or ():
            what = " of the best weights" if failure.get("best") else ""
            if lives(str(failure.get("by"))):
                findings.append(
                    warning(
                        "export-error",
                        f"step {failure.get('step')}",
                        f"the export{what} is still being written",
                        "wait for it if it is the one that is meant",
                    )
                )
                continue
            findings.append(
                error(
                    "export-error",
                    f"step {failure.get('step')}",
                    f"the export{what} failed in training: {failure.get('message')}",
                    f"finalize the checkpoint of that step, or {chosen.name} by name",
                )
            )
    return findings


def _read(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return state if isinstance(state, dict) else {}
