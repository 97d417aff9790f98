"""SGLang releases: which are known, and how two compare."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from packaging.version import InvalidVersion, Version

from spec_export.findings import Finding, usage_error, warning
from spec_export.layout.data import data_path, read_yaml


@lru_cache(maxsize=1)
def _known() -> dict[str, Any]:
    path = data_path("ckpt_templates") / "sglang.yaml"
    known: dict[str, Any] = read_yaml(path)
    return known


def newest_known() -> str:
    """The newest release whose loaders were looked at."""
    return str(_known()["newest"])


def oldest_known() -> str:
    """The oldest release whose loaders were looked at."""
    return str(_known()["oldest"])


def float32_loads_as(model_type: str) -> str:
    """The dtype that ``--dtype auto`` gives a float32 model of this type."""
    rules: dict[str, str] = _known()["float32_loads_as"]
    known = (rules[word] for word in rules if model_type.startswith(word))
    return next(known, rules["other"])


def instead_of(kind: str) -> str | None:
    """What to train where no class serves a draft of this kind; None: unknown kind."""
    hints: dict[str, str] = _known()["instead"]
    return hints.get(kind)


def engine_setup(device: str) -> dict[str, Any]:
    """How the comparison starts SGLang on ``cpu`` or ``cuda``, as the data says it.

    Returns:
        ``device``, ``args`` (behind the launch line), ``algorithm_args`` (more of them,
        by algorithm), ``environment``, ``target_dtype`` (in transformers),
        ``counted_since`` (the release) and ``counts`` (names in an answer).
    """
    engine = _known()["engine"]
    own = engine["devices"][device]
    return {
        "device": device,
        "args": (*engine["args"], *own["args"]),
        "algorithm_args": own["algorithm_args"],
        "environment": own["environment"],
        "target_dtype": own["target_dtype"],
        "counted_since": engine["counted_since"],
        "counts": engine["counts"],
    }


def parse_release(text: str | None) -> tuple[Version, list[Finding]]:
    """Read the ``--sglang`` option.

    Args:
        text: A release such as ``0.5.17`` or ``0.5.10.post1``; None stands for
            the newest known one.

    Returns:
        The release, and a warning if it is newer than the newest known one (the
        newest rules are applied then).

    Raises:
        SpecExportError: exit code 2 for what is no release or too old to be known.
    """
    newest, oldest = Version(newest_known()), Version(oldest_known())
    if text is None:
        return newest, []
    hint = f"known are {oldest} to {newest}"
    try:
        release = Version(text)
    except InvalidVersion:
        raise usage_error(
            "option-invalid", "--sglang", f"{text!r} is no SGLang release", hint
        ) from None
    if release < oldest:
        raise usage_error(
            "option-invalid", "--sglang", f"{text} is older than any known one", hint
        )
    if release <= newest:
        return release, []
    return release, [
        warning(
            "release-unknown",
            "--sglang",
            f"{text} is newer than the newest known release {newest}; its rules are "
            f"assumed to be those of {newest}",
            "look for a newer spec-export",
        )
    ]
