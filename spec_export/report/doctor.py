"""``spec-export doctor``: what is installed, what is missing, each with its fix."""

from __future__ import annotations

import importlib.util
import platform
from importlib.metadata import PackageNotFoundError, version

from spec_export.findings import Finding, info, warning
from spec_export.judge.engine import host
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
    state, fix, problem = _engine()
    rows.append({"what": "engine leg", "state": state, "fix": fix})
    return rows, findings + problem


def _engine() -> tuple[str, str, list[Finding]]:
    """The SGLang that ``finalize`` would run: what it is, a fix, what is wrong."""
    python = host.sglang_python()
    if python is None:
        return "not run", host.why_none(), []
    try:
        sglang = host.examine(python)
    except host.EngineFailed as problem:
        subject, fix = host.PYTHON_VARIABLE, "name the Python that has SGLang, or none"
        said = warning("comparison-not-run", subject, f"{python}: {problem}", fix)
        return "not run", fix, [said]
    if not sglang.devices:
        fix = "it needs a CUDA device, or the CPU build of its kernels"
        return f"not run: SGLang {sglang.version} finds no device", fix, []
    plugin = "with our plug-in" if sglang.plugin else "without our plug-in"
    devices = " or ".join(sglang.devices)
    return f"SGLang {sglang.version} on {devices}, {plugin}", "", []


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
