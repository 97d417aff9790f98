"""The faults of the field that arise in a live run, through the callback.

One training with an export at each step: before some steps a saboteur breaks the
live module, after the export the old value is put back. So each fault is followed by
a step that has to succeed.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from spec_export.findings import SpecExportError
from spec_export.training.callback import SGLangExport
from tests.field.desk import Desk, Row
from tests.field.test_cases import EMBED, HEAD, IDS, WRITTEN_IDS
from tests.helpers.tiny import Tiny, make_tiny, run_training

Fault = tuple[str, str, Callable[[torch.Tensor], None], str, str]


def fill(number: float) -> Callable[[torch.Tensor], None]:
    """Put one number everywhere."""

    def change(value: torch.Tensor) -> None:
        value.fill_(number)

    return change


def nan_row(value: torch.Tensor) -> None:
    value[7, 2] = math.nan


def move(value: torch.Tensor) -> None:
    value.mul_(1.5)


def out_of_range(value: torch.Tensor) -> None:
    value[3] = 10**6


def twice(value: torch.Tensor) -> None:
    value[4] = value[3] - 1  # ids 3 and 4 mean the same


def invert(value: torch.Tensor) -> None:
    value.logical_not_()


# Case, tensor of the live module, what happens to it, subject and words of the answer.
FAULTS: list[Fault] = [
    ("8 (a)", HEAD, fill(math.nan), HEAD, "NaN"),
    ("8 (b)", EMBED, nan_row, EMBED, "row 7"),
    ("8 (c)", "fc.weight", fill(0), "fc.weight", "zero"),
    ("8 norm", "norm.weight", fill(math.inf), "norm.weight", "infinite"),
    ("7 (a)", "d2t", out_of_range, "d2t", "which is none"),
    ("7 (b)", "d2t", twice, "d2t", "both mean"),
    ("7 (f)", "d2t", fill(0), "t2d", "which d2t reaches"),
    ("7 (c)", "t2d", invert, "t2d", "d2t"),
    ("4 trained embedding", EMBED, move, EMBED, "target's embedding"),
]


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    return make_tiny()


class Saboteur:
    """Breaks one tensor before every second export, and mends it afterwards."""

    def __init__(self) -> None:
        self.kept: dict[str, torch.Tensor] = {}

    @staticmethod
    def fault(step: int) -> Fault | None:
        """The fault of a step: the even ones have one."""
        at, odd = divmod(step, 2)
        return None if odd or at > len(FAULTS) else FAULTS[at - 1]

    def on_event(self, event: Any) -> None:
        fault = self.fault(event.global_step) if event.reason == "step" else None
        if fault is not None:
            value = event.trainer.model.state_dict()[fault[1]]
            self.kept[fault[1]] = value.clone()
            with torch.no_grad():
                fault[2](value)

    def mend(self, event: Any) -> None:
        held = event.trainer.model.state_dict()
        for name, value in self.kept.items():
            held[name].copy_(value)
        self.kept.clear()


class Mender:
    def __init__(self, saboteur: Saboteur) -> None:
        self.saboteur = saboteur

    def on_event(self, event: Any) -> None:
        self.saboteur.mend(event)


class Noted(SGLangExport):
    """Remembers which step failed with which findings."""

    def __init__(self, **init_args: Any) -> None:
        super().__init__(**init_args)
        self.failed: dict[int, SpecExportError] = {}

    def on_event(self, event: Any) -> None:
        before = len(self.errors)
        super().on_event(event)
        for problem in self.errors[before:]:
            assert isinstance(problem, SpecExportError), problem
            self.failed[event.global_step] = problem


def test_faults_of_live_tensors_fail_their_export_and_no_other(
    tiny: Tiny, desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    steps = 2 * len(FAULTS) + 1
    saboteur, output = Saboteur(), desk.root / "exports"
    exporter = Noted(
        output_dir=output, every={"steps": 1}, compare={"on": "never"}, background=False
    )
    flags = tiny.flags(desk.root / "run", "--max-steps", str(steps), "--epochs", "9")
    with caplog.at_level(logging.ERROR):
        run_training(flags, saboteur, exporter, Mender(saboteur))
    for step in range(1, steps + 1):
        fault, folder = saboteur.fault(step), output / f"step-{step:08d}"
        assert folder.exists() == (fault is None), step
        if fault is None:
            desk.ok(f"callback step {step}", desk.run("verify", folder))
            continue
        case, _, _, subject, says = fault
        problem = exporter.failed.pop(step)
        told = [(f.subject, f.message) for f in problem.findings]
        assert any(s == subject and says in m for s, m in told), told
        desk.rows.append(Row(f"callback {case}", "FAIL", problem.exit_code, subject))
        assert any(subject in r.getMessage() for r in caplog.records)
    assert not exporter.failed


@pytest.mark.parametrize(
    "case, flags, options, subject, says",
    [
        ("13 true", ["--norm-before-residual"], {}, "norm_before_residual", "true"),
        (
            "17 (f)",
            ["--draft-arch", "qwen3"],
            {},
            "layers.0.self_attn.q_norm.weight",
            "drops",
        ),
        ("10 (b)", ["--target-layer-ids", "1", "2", "3", "4"], {}, IDS, "0.5.12"),
        ("2 two layers", ["--num-layers", "2"], {}, "num_hidden_layers", "0.5.12"),
        ("norm_before_fc", ["--norm-before-fc"], {}, "norm_before_fc", "0.5.17"),
    ],
)
def test_drafts_that_an_old_server_cannot_serve_are_refused_before_the_first_step(
    tiny: Tiny,
    desk: Desk,
    case: str,
    flags: list[str],
    options: dict[str, Any],
    subject: str,
    says: str,
) -> None:
    exporter = SGLangExport(
        output_dir=desk.root / "exports", plugin="never", sglang="0.5.9", **options
    )
    with pytest.raises(SpecExportError) as caught:
        run_training(tiny.flags(desk.root / "run", *flags), exporter)
    about = [f for f in caught.value.findings if f.subject.endswith(subject)]
    assert any(says in f.message for f in about), caught.value.findings
    assert not (desk.root / "exports").exists()
    row = Row(f"callback {case}, 0.5.9", "FAIL", caught.value.exit_code, subject)
    desk.rows.append(row)


def test_an_export_for_an_old_server_says_how_to_start_it(
    tiny: Tiny, desk: Desk
) -> None:
    """Case 2 and the mixed dtypes of case 19: the live module is float32."""
    exporter = SGLangExport(output_dir=desk.root / "exports", sglang="0.5.9")
    ids = [
        "--target-layer-ids",
        "1",
        "2",
        "3",
        "--no-norm-before-fc",
        "--no-norm-output",
    ]
    flags = tiny.flags(desk.root / "run", "--max-steps", "1", *ids)
    run_training(flags, exporter)
    assert not exporter.errors
    folder = desk.root / "exports" / "latest"
    manifest = json.loads((folder / "spec_export_manifest.json").read_text())
    assert "--disable-cuda-graph" in manifest["serving"]["launch"]
    assert not [n for n in manifest["tensors"] if n.startswith("layers.")]
    kinds = {e["dtype"] for n, e in manifest["tensors"].items() if n != "d2t"}
    assert kinds == {"BF16"}
    assert manifest["tensors"]["d2t"]["dtype"] == "I64"
    assert manifest["comparison"]["layout"]["verdict"] == "pass"
    answer = desk.run("verify", folder, "--sglang", "0.5.9", "--target", tiny.target)
    desk.warned("callback 2 old", answer, WRITTEN_IDS, "0.5.11")
