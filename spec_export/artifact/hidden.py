"""Hidden names for what is being made, and the removal of what crashes leave."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import socket
import time
import uuid
from pathlib import Path

STAGING = ".staging-"
OLD = ".old-"
TRASH = ".trash-"
TEMPORARY = ".tmp-"  # files and links; the others are folders
# <prefix><name>-<machine>-<pid>-<unique>
_HIDDEN = re.compile(
    r"(\.staging-|\.old-|\.trash-|\.tmp-)(.+)-([0-9a-f]{12})-(\d+)-([0-9a-f]{8})",
    re.ASCII,
)
# Leftovers of another machine: nobody can tell whether their process lives.
_ABANDONED_SECONDS = 7 * 24 * 3600


def hidden_name(prefix: str, name: str) -> str:
    """A name that nobody else has, and that tells whose it is."""
    return f"{prefix}{name}-{this_process()}-{uuid.uuid4().hex[:8]}"


def this_process() -> str:
    """For others to ask whether it ``lives``."""
    return f"{_machine()}-{os.getpid()}"


def lives(process: str) -> bool:
    """Whether a process is there; of one of another machine nobody can tell: no."""
    machine, _, pid = process.partition("-")
    return machine == _machine() and pid.isdecimal() and _alive(int(pid))


def _machine() -> str:
    """Tells whether a process id can be looked up here: host, boot, namespace."""
    parts = [socket.gethostname()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(str(os.stat("/proc/self/ns/pid").st_ino))
    except OSError:
        pass  # not Linux: the host alone
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


def sweep(parent: Path) -> list[Path]:
    """Remove what processes that died left behind; give an old export its name back.

    Folders of processes that live are not touched, nor those of other machines
    that are younger than a week.

    Returns:
        What is gone.
    """
    gone = []
    for path in sorted(parent.glob(".*-*")):
        match = _HIDDEN.fullmatch(path.name)
        if not match:
            continue
        prefix, name, machine, pid = match[1], match[2], match[3], int(match[4])
        if (prefix != TEMPORARY) != (path.is_dir() and not path.is_symlink()):
            continue  # not what we give this name to
        if machine == _machine():
            if _alive(pid):
                continue
        elif time.time() - path.lstat().st_mtime < _ABANDONED_SECONDS:
            continue
        try:
            if prefix == TEMPORARY:
                path.unlink()
            elif prefix == OLD and not os.path.lexists(parent / name):
                os.rename(path, parent / name)
            else:
                shutil.rmtree(path)
        except OSError:
            continue  # another process sweeps too, or it is not ours to delete
        gone.append(path)
    return gone
