"""Our stand-in for SGLang's CPU kernels does what SGLang's Triton kernels do."""

from __future__ import annotations

import json
import subprocess

from tests.serving.sglang_process import HERE, sglang_environment, sglang_python


def test_stand_in_equals_triton_kernels() -> None:
    done = subprocess.run(
        [sglang_python(), HERE / "shim_check.py"],
        env=sglang_environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads(done.stdout.splitlines()[-1])
    assert len(summary["functions"]) == 11  # ten functions and the attention
    assert len(summary["checks"]) == 6
