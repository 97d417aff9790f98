"""Finishing an export where it lies: its card and its manifest change, no weights."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from spec_export.artifact.disk import disk_errors, replace_file
from spec_export.artifact.hidden import sweep
from spec_export.artifact.manifest import MANIFEST_NAME, FileEntry, Manifest


def finish_in_place(folder: Path, manifest: Manifest, name: str, card: bytes) -> None:
    """Write the card, then the manifest that lists it.

    Whoever reads meanwhile, or after a crash, finds an export that verifies: while the
    card is replaced, no manifest vouches for it.

    Args:
        folder: The export.
        manifest: The one to write; gets the card's entry.
        name: The card's file name.
        card: Its content.

    Raises:
        SpecExportError: exit 2, such as for a full disk; the export verifies as before.
    """
    with _alone(folder):
        sweep(folder)
        before = Manifest.read(folder)
        if before.files.pop(name, None) is not None:
            replace_file(folder / MANIFEST_NAME, before.to_bytes())
        fact = replace_file(folder / name, card)
        manifest.files[name] = FileEntry(sha256=fact.sha256, size=fact.size)
        replace_file(folder / MANIFEST_NAME, manifest.to_bytes())


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other process finishes this export: card and manifest are a pair.

    Where the file system has no locks, nobody is waited for.
    """
    with disk_errors(folder):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
