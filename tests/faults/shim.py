"""Sees each call that changes a folder, and can make one of them the last."""

from __future__ import annotations

import builtins
import io
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

CALLS = ("open", "mkdir", "rename", "replace", "symlink", "unlink", "rmdir", "fsync")


class Shim:
    """Wraps ``os`` and ``io.open`` in this process, for good.

    Args:
        root: Calls that do not concern it are let through and not counted.
        at: The call that is special, counted from 1; 0 for none.
        mode: ``before`` and ``after`` kill this process then, ``half`` writes half of
            the bytes first, ``error`` fails the call.
        errno: Of ``error``.
    """

    def __init__(
        self, root: Path, at: int = 0, mode: str = "before", errno: int = 0
    ) -> None:
        self.root = str(root)
        self.at, self.mode, self.errno = at, mode, errno
        self.log: list[str] = []

    def install(self) -> None:
        for name in CALLS:
            setattr(os, name, self._wrapped(name, getattr(os, name)))
        self._open = io.open
        io.open = builtins.open = self._opened  # type: ignore[assignment]
        # Copies go through the file that we opened, not from descriptor to descriptor.
        vars(shutil)["_USE_CP_SENDFILE"] = False

    def _place(self, name: str, args: tuple[Any, ...], more: dict[str, Any]) -> str:
        """The path that a call is about, relative to the root; '' for a stranger."""
        target = args[1] if name in ("rename", "replace", "symlink") else args[0]
        if isinstance(target, int):
            target = os.readlink(f"/proc/self/fd/{target}")
        path = os.fspath(target)
        folder = more.get("dir_fd")
        if folder is not None:
            path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)
        return self._below(path)

    def _below(self, path: str) -> str:
        if path == self.root:
            return "."
        return path.removeprefix(f"{self.root}/") if f"{self.root}/" in path else ""

    def step(self, name: str, place: str, act: Callable[[], Any]) -> Any:
        """Do a call, or what was asked for in its place."""
        self.log.append(f"{name} {place}")
        special = len(self.log) == self.at
        if special and self.mode == "error":
            raise OSError(self.errno, os.strerror(self.errno), place)
        if special and self.mode == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            return act()
        finally:
            if special:
                os.kill(os.getpid(), signal.SIGKILL)

    def _wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **more: Any) -> Any:
            place = self._place(name, args, more)
            if not place:
                return call(*args, **more)
            return self.step(name, place, lambda: call(*args, **more))

        return wrapper

    def _opened(self, file: Any, mode: str = "r", *args: Any, **more: Any) -> Any:
        path = "" if isinstance(file, int) else os.fspath(file)
        place = self._below(path)
        if "w" not in mode or not place:
            return self._open(file, mode, *args, **more)
        # Without a buffer each write is a call of its own, that can be seen.
        buffered = 0 not in args and more.get("buffering") != 0
        opened = self.step("create", place, lambda: self._open(path, mode, 0))
        return _File(opened, self, place, buffered)


class _File:
    def __init__(self, file: Any, shim: Shim, place: str, buffered: bool) -> None:
        self.file, self.shim, self.place = file, shim, place
        self.buffered = buffered

    def write(self, data: Any) -> int:
        written = self._write(data)
        while self.buffered and written < len(data):  # what a buffer does
            written += self._write(data[written:])
        return written

    def _write(self, data: Any) -> int:
        def act() -> int:
            if len(self.shim.log) == self.shim.at and self.shim.mode == "half":
                return int(self.file.write(bytes(data)[: len(data) // 2]))
            return int(self.file.write(data))

        return int(self.shim.step("write", self.place, act))

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *args: Any) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)
