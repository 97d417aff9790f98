"""Our stand-in for SGLang's CPU kernels does what SGLang's Triton kernels do."""

from __future__ import annotations

from tests.serving.sglang_process import answer_of


def test_stand_in_equals_triton_kernels() -> None:
    summary = answer_of("shim_check.py")
    assert len(summary["functions"]) == 11  # ten functions and the attention
    assert len(summary["checks"]) == 6
