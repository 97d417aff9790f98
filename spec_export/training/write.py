"""From a snapshot of the live draft to an export on the disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from spec_export.artifact.roles import Known
from spec_export.artifact.target import Target
from spec_export.export import ExportOptions, ExportResult, Judge, export_source
from spec_export.findings import Finding
from spec_export.training.snapshot import Snapshot


def write_export(
    snapshot: Snapshot,
    target: Target | None,
    options: ExportOptions,
    destination: Path,
    judge: Judge | None,
    before: Sequence[Finding] = (),
    known: Known | None = None,
) -> ExportResult:
    """Write a snapshot through the pipeline that ``finalize`` uses too.

    Args:
        snapshot: The draft.
        target: Its target, if its configuration is at hand.
        options: The user's choices.
        destination: ``<output_dir>/step-<8 digits>``.
        judge: Compares what was written with the live module.
        before: Findings to record: what went wrong since the last export.
        known: What earlier exports saw of frozen tensors.
    """
    return export_source(
        snapshot,
        target,
        options,
        destination,
        judge=judge,
        place="step",
        before=before,
        known=known,
    )
