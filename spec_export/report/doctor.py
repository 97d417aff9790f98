"""``spec-export doctor``: what is installed, what is missing, each with its fix."""

from __future__ import annotations

import importlib.util
import platform
from importlib.metadata import PackageNotFoundError, version

from spec_export.findings import Finding, info, warning
from spec_export.layout.releases import newest_known, oldest_known

_TRAIN = ("torch", "speculators", "accelerate", "transformers")


def examine() -> tuple[list[dict[str, str]], list[Finding]]:
    """Look at this machine.

    Returns:
        Rows ``{"what", "state", "fix"}``, and a finding for each thing that is
        missing or outside the range that was tested.
    """
    rows = [
        {"what": "python", "state": platform.python_version(), "fix": ""},
        {
            "what": "SGLang known",
            "state": f"{oldest_known()} to {newest_known()}",
            "fix": "",
        },
    ]
    findings: list[Finding] = []
    for name in ("spec-export", "safetensors", *_TRAIN, "sglang"):
        found = _version(name)
        fix = "" if found else _fix(name)
        rows.append({"what": name, "state": found or "not installed", "fix": fix})
        if not found and name in _TRAIN:
            findings.append(
                info("dependency-missing", name, "is needed to train and compare", fix)
            )
    speculators = _version("speculators")
    if speculators and not speculators.startswith(("0.8.1", "0.9")):
        findings.append(
            warning(
                "dependency-missing",
                "speculators",
                f"{speculators} was not tested; 0.8.1 and 0.9 were",
                'pip install "speculators>=0.8.1,<0.10"',
            )
        )
    rows.append({"what": "device", "state": _device(), "fix": ""})
    return rows, findings


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _fix(name: str) -> str:
    if name == "sglang":
        return "pip install sglang (on the server)"
    return 'pip install "spec-export[train]"'


def _device() -> str:
    if importlib.util.find_spec("torch") is None:
        return "unknown (torch is not installed)"
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name(0)
    return "cpu only: training is adapted to it, comparisons run in float32"
