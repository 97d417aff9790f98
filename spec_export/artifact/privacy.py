"""Keeping what is private out of a file that travels with weights.

Paths, user and host names, tokens and logger settings do not belong in a
manifest.
"""

from __future__ import annotations

import getpass
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

# Groups and leaves of a recipe that say where things are or who runs them.
_PRIVATE_KEYS = re.compile(
    r"(?i)^(logg(ing|er|ers)|wandb.*|mlflow.*|trackio.*|tensorboard.*|log_dir|run_name"
    r"|.*endpoints?|.*(_|-|^)(url|uri|host|hostname|port|user|username|email)"
    r"|.*(api_?key|password|secret|credentials?)"
    r"|((hf|hub|auth|access|api|bearer|use_auth)_?)?token)$"
)
_TOKENS = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|(sk|pk|rk)-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}"
    r"|github_pat_\w{16,}|glpat-[\w-]{16,}|xox[abp]-[\w-]{10,}|AKIA[A-Z0-9]{16}"
    r"|(?i:bearer) [A-Za-z0-9._-]{16,})"
)
# user:password@ of an address.
_USERINFO = re.compile(r"(?<=://)[^/\s@]+@")
_FILE_URL = re.compile(r"\bfile://[^\s'\"`<>|;,()\[\]{}]+")
# Not a slash within a word or an address ("q/k", "https://..."), nor one alone.
_UNIX_PATH = re.compile(r"(?<![\w.}/])~?/(?:[^\s'\"`<>|:;,()\[\]{}/]+/?)+")
_USER_HOME = re.compile(r"(?<![\w.}/])~[A-Za-z_][\w-]*/(?:[^\s'\"`,;:()]+)")
# A value that is a path as a whole may hold spaces and brackets.
_WHOLE_PATH = re.compile(r"(?:~[\w-]*)?/[^/\s'\"][^\n]*")
_WINDOWS_PATH = re.compile(r"\b[A-Za-z]:\\[^\s'\"`<>|;,()\[\]{}]+|\\\\[^\s'\"`;,]+")
# Too common to be replaced wherever they occur in a sentence.
_COMMON_NAMES = frozenset(
    {"root", "user", "admin", "localhost", "ubuntu", "node", "worker", "test", "main"}
)
_REMOVED = "[removed]"


def scrub(content: Any) -> Any:
    """A copy of plain data whose strings hold no private fact.

    Absolute paths shrink to their last part; tokens, user and host names become
    ``[removed]``. Keys of objects are strings too.
    """
    if isinstance(content, dict):
        return {
            _clean(key) if isinstance(key, str) else key: scrub(value)
            for key, value in content.items()
        }
    if isinstance(content, list | tuple):
        return [scrub(item) for item in content]
    return _clean(content) if isinstance(content, str) else content


def scrub_recipe(recipe: Any) -> Any:
    """A copy of a recipe without loggers, endpoints and tokens, then scrubbed."""
    return scrub(_without_private_keys(recipe))


def find_leaks(content: Any) -> list[str]:
    """Where plain data still holds something private, as dotted paths."""
    return [where for where, text in _strings(content, "") if _clean(text) != text]


def _without_private_keys(content: Any) -> Any:
    if isinstance(content, dict):
        return {
            key: _without_private_keys(value)
            for key, value in content.items()
            if not (isinstance(key, str) and _PRIVATE_KEYS.match(key))
        }
    if isinstance(content, list | tuple):
        return [_without_private_keys(item) for item in content]
    return content


def _clean(text: str) -> str:
    text = _TOKENS.sub(_REMOVED, text)
    text = _USERINFO.sub("", text)
    text = _FILE_URL.sub(lambda m: PurePosixPath(m[0]).name or _REMOVED, text)
    if _WHOLE_PATH.fullmatch(text) and " /" not in text:
        text = PurePosixPath(text).name
    text = _WINDOWS_PATH.sub(lambda m: PureWindowsPath(m[0]).name or _REMOVED, text)
    text = _USER_HOME.sub(lambda m: PurePosixPath(m[0]).name, text)
    text = _UNIX_PATH.sub(lambda m: PurePosixPath(m[0]).name or _REMOVED, text)
    names = _private_names()
    return names.sub(_REMOVED, text) if names else text


@cache
def _private_names() -> re.Pattern[str] | None:
    """User and host name of this process, as whole words."""
    found = {socket.gethostname(), socket.gethostname().partition(".")[0]}
    with suppress(KeyError, OSError, ImportError):  # a user id without a name
        found.add(getpass.getuser())
    names = sorted(n for n in found if len(n) > 3 and n.lower() not in _COMMON_NAMES)
    if not names:
        return None
    words = "|".join(re.escape(name) for name in names)
    return re.compile(rf"(?<![\w.-])(?:{words})(?![\w-])")


def _strings(content: Any, where: str) -> Iterator[tuple[str, str]]:
    if isinstance(content, dict):
        for key, value in content.items():
            if isinstance(key, str):
                yield f"{where}.{key}".lstrip("."), key
            yield from _strings(value, f"{where}.{key}".lstrip("."))
    elif isinstance(content, list | tuple):
        for index, value in enumerate(content):
            yield from _strings(value, f"{where}[{index}]")
    elif isinstance(content, str):
        yield where, content
