"""Making an export visible: whole, or not at all, also after a crash.

An export is written into a hidden folder beside its place, forced to the disk
and renamed. Its manifest is the last file in it, so that a copy on a store
without atomic renames can be told from a torn one too.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from spec_export.artifact.disk import disk_errors, sync_folder, sync_tree
from spec_export.artifact.hidden import (
    OLD,
    STAGING,
    TEMPORARY,
    TRASH,
    hidden_name,
    sweep,
)
from spec_export.artifact.manifest import MANIFEST_NAME, Manifest
from spec_export.artifact.resolve import step_folders
from spec_export.findings import SpecExportError, usage_error

# What a model folder consists of; --force deletes nothing else.
_MODEL_FILES = (
    *(".safetensors", ".bin", ".pt", ".npy", ".npz", ".model", ".json", ".yaml"),
    *(".md", ".txt", ".html", ".jinja", ".py", ".gitattributes"),
)
_MODEL_FOLDERS = frozenset({"probe"})
_TAKEN = frozenset({errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR})


class Staging:
    """A hidden folder to write an export into; removes itself unless published.

    Use it as a context manager. Leftovers of processes that died are swept from
    the parent on entry.

    Attributes:
        path: The folder, on the file system of the parent.
    """

    def __init__(self, parent: str | Path, name: str) -> None:
        self.parent = Path(parent)
        self.path = self.parent / hidden_name(STAGING, name)

    def __enter__(self) -> Staging:
        with disk_errors(self.parent):
            self.parent.mkdir(parents=True, exist_ok=True)
            sweep(self.parent)
            self.path.mkdir()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def step_name(global_step: int) -> str:
    """Name of the export of a step: ``step-00000450``."""
    return f"step-{global_step:08d}"


def publish_new(staging: Path, dest: Path) -> Path:
    """Give a complete staging folder its name, which must be free.

    Args:
        staging: On the file system of ``dest``; gone afterwards.
        dest: The path of the export.

    Returns:
        ``dest``.

    Raises:
        SpecExportError: exit 2, ``output-exists`` or ``disk-full``.
    """
    with disk_errors(staging):
        sync_tree(staging)
    if os.path.lexists(dest) and not _is_empty_folder(dest):
        raise _exists(dest)
    with disk_errors(dest):
        try:
            os.rename(staging, dest)
        except OSError as problem:
            if problem.errno in _TAKEN:  # someone was faster
                raise _exists(dest) from problem
            raise
        try:
            sync_folder(dest.parent)
        except OSError:
            os.rename(dest, staging)  # who asked is told that nothing is there
            raise
    return dest


def publish_step(
    staging: Path, parent: Path, name: str, *, failed: bool = False
) -> Path:
    """Publish under a step's name, or the next one that is free.

    ``step-00000450`` taken by an export of the same files is that export, which
    makes a repeated call harmless; taken by others, ``step-00000450.2`` is tried.

    Args:
        staging: A complete export.
        parent: The output_dir.
        name: From ``step_name``.
        failed: Add ``.failed``: its comparison failed.

    Returns:
        Where the export is now.

    Raises:
        SpecExportError: exit 2, ``disk-full``.
    """
    files = _files_of(staging)
    number = 1
    while True:
        plain = name if number == 1 else f"{name}.{number}"
        dest = parent / f"{plain}{'.failed' if failed else ''}"
        other = parent / f"{plain}{'' if failed else '.failed'}"
        if os.path.lexists(dest) and files is not None and files == _files_of(dest):
            shutil.rmtree(staging)
            return dest
        if not os.path.lexists(dest) and not os.path.lexists(other):
            try:
                return publish_new(staging, dest)
            except SpecExportError as problem:
                if problem.findings[0].code != "output-exists":
                    raise
        number += 1


def replace_existing(staging: Path, dest: Path) -> Path:
    """Put a complete staging folder in the place of an old export (``--force``).

    The old one stays untouched until the new one is on the disk; then the two
    names are exchanged in one step where the system can do that.

    Args:
        staging: A complete export beside ``dest``; gone afterwards.
        dest: What is replaced; a link is followed. May be absent.

    Returns:
        The folder that was replaced.

    Raises:
        SpecExportError: exit 2, ``output-exists`` if ``dest`` holds something
            that is not part of a model folder; ``disk-full``.
    """
    dest = dest.resolve()
    if not os.path.lexists(dest) or _is_empty_folder(dest):
        return publish_new(staging, dest)
    check_replaceable(dest)
    with disk_errors(staging):
        sync_tree(staging)
        exchanged = _exchange(staging, dest)
        old = staging if exchanged else _swap(staging, dest)
        try:
            sync_folder(dest.parent)
        except OSError:  # who asked is told that the old one is still there
            if exchanged:
                _exchange(staging, dest)
            else:
                os.rename(dest, staging)
                os.rename(old, dest)
            raise
    shutil.rmtree(old, ignore_errors=True)
    return dest


def _swap(staging: Path, dest: Path) -> Path:
    """Exchange two names in two steps.

    A crash between them leaves only the old export, under a hidden name that
    ``sweep`` gives back.

    Returns:
        Where the old one is.
    """
    old = dest.parent / hidden_name(OLD, dest.name)
    os.rename(dest, old)
    try:
        os.rename(staging, dest)
    except OSError:
        os.rename(old, dest)
        raise
    return old


def check_replaceable(dest: Path) -> None:
    """Refuse to delete a folder that is more than a model.

    Raises:
        SpecExportError: exit 2, ``output-exists``.
    """
    if not dest.is_dir():
        raise usage_error("output-exists", dest.name, f"{dest} is a file")
    for child in sorted(dest.iterdir()):
        is_part = (
            child.name in _MODEL_FOLDERS
            if child.is_dir() and not child.is_symlink()
            else child.name.endswith(_MODEL_FILES)
        )
        if not is_part:
            raise usage_error(
                "output-exists",
                dest.name,
                f"{dest} holds {child.name}, which is no part of an export",
                "--force replaces a model folder only; take another --output",
            )


def point_link(link: Path, name: str) -> None:
    """Let a link such as ``latest`` name a folder beside it, in one step.

    Raises:
        SpecExportError: exit 2, ``output-exists`` where a real file or folder has
            this name.
    """
    if link.is_symlink():
        if os.readlink(link) == name:
            return
    elif link.exists():
        raise usage_error(
            "output-exists", link.name, f"{link} is there and is not a link of ours"
        )
    beside = link.with_name(hidden_name(TEMPORARY, link.name))
    with disk_errors(link):
        try:
            os.symlink(name, beside)
            os.replace(beside, link)
        except BaseException:
            with suppress(OSError):
                beside.unlink(missing_ok=True)
            raise
        sync_folder(link.parent)


def settle(
    output_dir: Path,
    folder: Path,
    *,
    best: Path | None = None,
    keep_last: int | None = None,
    run_id: str | None = None,
) -> None:
    """What follows when an export of a training is there: links, then retention.

    Args:
        output_dir: Of the callback.
        folder: The new export in it.
        best: The run's best export, if it is there.
        keep_last: As ``retain``.
        run_id: The run.
    """
    point_link(output_dir / "latest", folder.name)
    if best is not None:
        point_link(output_dir / "best", best.name)
    retain(output_dir, keep_last, run_id, best)


def retain(
    parent: Path,
    keep_last: int | None,
    run_id: str | None = None,
    also: Path | None = None,
) -> list[Path]:
    """Remove old exports, never those that ``best`` or ``latest`` name or final ones.

    Folders without a readable manifest are left alone. An export is renamed out
    of sight before it is deleted, so that no half-deleted one is ever seen.

    Args:
        parent: The output_dir.
        keep_last: How many of the newest to keep, failed ones not counted, which
            go together with the exports around them; None keeps all.
        run_id: Touch only exports of this run.
        also: Keep this one too.

    Returns:
        What was removed.
    """
    if keep_last is None:
        return []
    linked = {(parent / link).resolve() for link in ("best", "latest")}
    linked |= set() if also is None else {also.resolve()}
    by_age: list[tuple[Path, Manifest]] = []
    folders = step_folders(parent)  # by step: within one run no clock is asked
    if run_id is None:
        folders.sort(key=_published)
    for folder in reversed(folders):
        try:
            manifest = Manifest.read(folder)
        except SpecExportError:
            continue
        if run_id is None or manifest.run_id == run_id:
            by_age.append((folder, manifest))
    kept, removed = 0, []
    for folder, manifest in by_age:
        if kept < keep_last:
            kept += manifest.status != "failed"
        elif manifest.status != "final" and folder.resolve() not in linked:
            trash = parent / hidden_name(TRASH, folder.name)
            with disk_errors(folder):
                os.rename(folder, trash)
            shutil.rmtree(trash, ignore_errors=True)
            removed.append(folder)
    return removed


def _published(folder: Path) -> tuple[int, str]:
    try:
        return (folder / MANIFEST_NAME).stat().st_mtime_ns, folder.name
    except OSError:
        return 0, folder.name


def _files_of(folder: Path) -> dict[str, str] | None:
    """Digest by file name, of an export whose manifest can be read."""
    try:
        manifest = Manifest.read(folder)
    except SpecExportError:
        return None
    return {name: entry.sha256 for name, entry in manifest.files.items()} or None


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and not any(path.iterdir())


def _exists(dest: Path) -> SpecExportError:
    return usage_error(
        "output-exists",
        dest.name,
        f"{dest} exists",
        "--force replaces it, or take another --output",
    )


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two names in one step; False where the system cannot."""
    at_fdcwd, rename_exchange = -100, 2
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    result = rename(
        at_fdcwd, os.fsencode(first), at_fdcwd, os.fsencode(second), rename_exchange
    )
    return bool(result == 0)
