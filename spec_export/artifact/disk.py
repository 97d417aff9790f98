"""Writing files so that they survive a crash."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from spec_export.artifact.hidden import TEMPORARY, hidden_name
from spec_export.findings import usage_error

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NOT_WRITABLE = frozenset(
    {
        errno.EACCES,
        errno.EEXIST,
        errno.EPERM,
        errno.EROFS,
        errno.ENOENT,
        errno.ENOTDIR,
        errno.ENAMETOOLONG,
        errno.EIO,
    }
)


class FileFact(NamedTuple):
    """Digest and size of a file as it was written."""

    sha256: str
    size: int


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn what a disk can refuse into findings with exit code 2.

    Args:
        path: What was being written, for the message.

    Raises:
        SpecExportError: ``disk-full``, or ``output-unwritable`` where the place cannot
            be written to.
    """
    try:
        yield
    except OSError as problem:
        if problem.errno in _NO_SPACE:
            raise usage_error(
                "disk-full",
                path.name,
                f"{path} cannot be written: {problem.strerror}",
                "free some space, or write to another disk",
            ) from problem
        if problem.errno in _NOT_WRITABLE:
            raise usage_error(
                "output-unwritable",
                path.name,
                f"{path} cannot be written: {problem.strerror}",
            ) from problem
        raise


def write_file(path: Path, data: bytes) -> FileFact:
    """Write a new file and force it to the disk; mode 0666 less the umask.

    Not atomic: for a folder that nobody reads yet.

    Raises:
        SpecExportError: exit 2, ``disk-full``.
    """
    with disk_errors(path), path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return FileFact(hashlib.sha256(data).hexdigest(), len(data))


def replace_file(path: Path, data: bytes) -> FileFact:
    """Replace a file in a folder that may be read meanwhile: old or new, never part.

    Raises:
        SpecExportError: exit 2, ``disk-full``; the old file is untouched.
    """
    beside = path.with_name(hidden_name(TEMPORARY, path.name))
    with disk_errors(path):
        try:
            fact = write_file(beside, data)
            os.replace(beside, path)
        except BaseException:
            with suppress(OSError):
                beside.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)
    return fact


def sync_folder(folder: Path) -> None:
    """Force a folder's entries to the disk, so that a rename in it lasts."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as problem:
        # Some network file systems cannot do this for a folder.
        if problem.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Force a folder and all that is in it to the disk, files first."""
    for base, _, names in os.walk(folder, topdown=False):
        for name in names:
            path = Path(base, name)
            if path.is_symlink():
                continue
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_folder(Path(base))


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read it, and only a file: a pipe would block, a device not end.

    Raises:
        OSError: also for what is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return open(descriptor, "rb")


def read_regular(path: Path) -> bytes:
    """The content of a regular file.

    Raises:
        OSError: as ``open_regular``.
    """
    with open_regular(path) as file:
        return file.read()


def hash_file(path: Path, stop: Callable[[], object] = bool) -> FileFact:
    """Digest and size of a file, read once with little memory.

    Args:
        path: The file.
        stop: Whether to end the reading after the block at hand.

    Raises:
        OSError: as ``open_regular``, and where it was stopped.
    """
    digest, size = hashlib.sha256(), 0
    # Whole pages: a bytearray starts 16 bytes into one, which doubles the time that
    # the system takes to copy a file there (a tenth of this pass).
    buffer = memoryview(mmap.mmap(-1, 1 << 20))
    with open_regular(path) as file:
        while count := file.readinto(buffer):  # type: ignore[attr-defined]
            digest.update(buffer[:count])
            size += count
            if stop():
                raise InterruptedError(errno.EINTR, "it was not read to its end")
    return FileFact(digest.hexdigest(), size)
