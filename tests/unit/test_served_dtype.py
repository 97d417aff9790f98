"""In which dtype SGLang computes draft and target, and what is said of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spec_export.layout.served_dtype import auto_dtype, dtype_flag
from tests.helpers import field
from tests.helpers.cli import spec_export


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "float32", "model_type": "llama"}, "float16"),
        ({"dtype": "float32", "model_type": "gemma3"}, "bfloat16"),
        # Of a multimodal model the text counts.
        ({"dtype": "float32", "text_config": {"dtype": "bfloat16"}}, "bfloat16"),
        (
            {"dtype": "float32", "text_config": {"model_type": "gemma4_text"}},
            "bfloat16",
        ),
        ({"dtype": "bfloat16", "text_config": {"model_type": "qwen3"}}, "bfloat16"),
        ({}, None),
        ({"dtype": None}, None),
        ({"dtype": 16}, None),
    ],
)
def test_auto(config: dict[str, Any], expected: str | None) -> None:
    assert auto_dtype(config) == expected


def test_only_what_differs_needs_a_flag() -> None:
    half, brain, full = ({"dtype": d} for d in ("float16", "bfloat16", "float32"))
    for same in ((half, half), (brain, brain), (full, full), (full, half), ({}, half)):
        assert dtype_flag(*same) == ([], [])
    argv, (found,) = dtype_flag(brain, half)
    assert argv == ["--dtype", "float16"]
    assert found.hint is not None and "--dtype float16" in found.hint
    argv, (found,) = dtype_flag(full, brain)
    assert argv == ["--dtype", "bfloat16"]
    assert "float16 (saved in float32)" in found.message


def test_all_the_way(tmp_path: Path) -> None:
    """The launch line has the flag, and who serves without it is told."""
    target = field.make_target(tmp_path / "target")
    (tmp_path / "target" / "config.json").write_text(
        json.dumps(
            json.loads((target / "config.json").read_text())
            | {"torch_dtype": "bfloat16", "dtype": "bfloat16"}
        )
    )
    checkpoint = field.make_draft(tmp_path / "checkpoint", target)
    flags = ("--target", target, "--no-compare")
    for dtype, told in (("float32", ["dtype-differs"]), ("bfloat16", [])):
        out = tmp_path / dtype
        ran = spec_export(
            "finalize", checkpoint, "--output", out, *flags, "--dtype", dtype
        )
        seen = spec_export("verify", out, "--target", target)
        assert (ran.code, seen.code) == (0, 0)
        for found in (ran.data["findings"], seen.data["findings"]):
            assert [f["code"] for f in found if f["code"] == "dtype-differs"] == told
        manifest = json.loads((out / "spec_export_manifest.json").read_text())
        assert ("--dtype" in manifest["serving"]["launch"]) is bool(told)
