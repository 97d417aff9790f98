"""Hands drafts to the command line, as people do, and checks the answers.

The commands run in this process (``cli.run``), with ``--json`` always; a few tests
start a real process to see that nothing depends on that.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from spec_export import cli
from tests.helpers.field import (
    Tensors,
    draft_config,
    draft_tensors,
    make_target,
    write_draft,
)

OLD, NEW = "0.5.9", "0.5.23"
# Largest difference of two logits, by the range of the logits.
TOLERANCE = 1e-5


class Row(NamedTuple):
    """A line of the table."""

    case: str
    outcome: str
    code: int
    subject: str

    def order(self) -> list[Any]:
        """Numbers in a case's name count as numbers."""
        parts = re.split(r"(\d+)", self.case)
        return [(0, int(p), "") if p.isdecimal() else (1, 0, p) for p in parts]


@dataclass
class Answer:
    """What a command said.

    Attributes:
        code: Its exit code.
        data: The object on stdout.
        output: Where ``finalize`` was told to write.
    """

    code: int
    data: dict[str, Any]
    output: Path | None = None

    def of(self, severity: str) -> list[dict[str, Any]]:
        """The findings of one severity."""
        return [f for f in self.data["findings"] if f["severity"] == severity]

    @property
    def config(self) -> dict[str, Any]:
        """The export's config.json."""
        assert self.output is not None
        found: dict[str, Any] = json.loads((self.output / "config.json").read_text())
        return found

    @property
    def manifest(self) -> dict[str, Any]:
        """The export's manifest."""
        assert self.output is not None
        path = self.output / "spec_export_manifest.json"
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    @property
    def tensors(self) -> Tensors:
        """The export's tensors."""
        assert self.output is not None
        found: Tensors = {}
        for file in sorted(self.output.glob("*.safetensors")):
            found |= load_file(file)
        return found


@dataclass
class Desk:
    """A folder with T0 in it, and the commands.

    Attributes:
        root: Everything is in it.
        rows: The table, shared by all tests of a run.
    """

    root: Path
    rows: list[Row]
    target: Path = field(init=False)
    _count: int = 0

    def __post_init__(self) -> None:
        self.target = make_target(self.root / "T0")

    def draft(
        self,
        tensors: Tensors | None = None,
        *,
        target: Path | None = None,
        add: Tensors | None = None,
        drop: tuple[str, ...] = (),
        **config: Any,
    ) -> Path:
        """Write E0 with changes.

        Args:
            tensors: All of them; E0's with the target's embedding and head by
                default.
            target: Trained with this one instead of T0.
            add: Tensors that are added or replaced.
            drop: Names that are left out.
            config: Changes of config.json (``draft_config``).
        """
        target = target or self.target
        found = dict(draft_tensors(target) if tensors is None else tensors)
        found |= add or {}
        found = {k: v for k, v in found.items() if k not in drop}
        return write_draft(self.new("E0"), draft_config(target, **config), found)

    def new(self, name: str) -> Path:
        """A path that is not taken."""
        self._count += 1
        return self.root / f"{name}-{self._count}"

    def run(self, command: str, *arguments: Any) -> Answer:
        """Run one command with ``--json``."""
        content, argv = io.BytesIO(), [command, *map(str, arguments), "--json"]
        with contextlib.redirect_stdout(io.TextIOWrapper(content, "utf-8")) as stdout:
            code = cli.run(argv)
            stdout.flush()
        data = json.loads(content.getvalue())
        assert data["command"] == command
        assert data["ok"] is (code == 0)
        return Answer(code, data)

    def finalize(
        self, source: Path, *options: Any, output: Path | None = None
    ) -> Answer:
        """``finalize`` to a new path; judged unless ``--no-compare`` is given."""
        output = output or self.new("export")
        answer = self.run("finalize", source, "--output", output, *options)
        answer.output = output
        return answer

    def verify(self, folder: Path, *options: Any) -> Answer:
        """``verify`` for the target T0, unless another one is among the options."""
        if "--target" not in options:
            options = (*options, "--target", self.target)
        return self.run("verify", folder, *options)

    def ok(self, case: str, answer: Answer) -> Answer:
        """The answer is yes; an export that was compared is within tolerance."""
        assert answer.code == 0, answer.data["findings"]
        assert not answer.of("error")
        warnings = answer.of("warning")
        outcome = "WARN" if warnings else "OK"
        subject = ", ".join(f["subject"] for f in warnings) or "-"
        self.rows.append(Row(case, outcome, 0, subject))
        if answer.output is not None:
            self._recorded(answer)
        return answer

    def _recorded(self, answer: Answer) -> None:
        """What is on the screen is in the manifest too, the comparison is close."""
        manifest = answer.manifest
        assert manifest["status"] == "final"
        assert manifest["findings"] == answer.data["findings"]
        leg = manifest["comparison"]["layout"]
        if not leg["ran"]:
            return
        assert answer.data["verdict"] == leg["verdict"] == "pass"
        assert len(leg["metrics"]) >= 3
        for step in leg["metrics"]:
            assert step["max_rel"] <= TOLERANCE, step
            assert step["top1"] == 1

    def warned(self, case: str, answer: Answer, subject: str, *says: str) -> Answer:
        """Yes, with a warning about this subject that holds these words."""
        self.ok(case, answer)
        _named(answer.of("warning"), subject, says)
        return answer

    def fails(
        self, case: str, answer: Answer, subject: str, *says: str, code: int = 1
    ) -> Answer:
        """No, because of this subject, in a message that holds these words."""
        assert answer.code == code, answer.data["findings"]
        _named(answer.of("error"), subject, says)
        self.rows.append(Row(case, "FAIL", code, subject))
        if answer.output is not None:
            assert not usable(answer.output)
        return answer


def usable(output: Path) -> bool:
    """Whether a path holds anything that a server could load, or leftovers of it."""
    hidden = [p.name for p in output.parent.glob(".staging-*")]
    assert not hidden, hidden
    return output.exists()


def _named(findings: list[dict[str, Any]], subject: str, says: tuple[str, ...]) -> None:
    about = [f for f in findings if f["subject"] == subject]
    assert about, f"{subject} is in none of {findings}"
    for word in says:
        assert any(word in f["message"] for f in about), f"{word!r} not in {about}"


def same_bits(a: Any, b: Any) -> bool:
    """Whether two torch tensors agree in dtype, shape and every bit."""
    import torch

    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype == torch.bfloat16:
        a, b = a.view(torch.int16), b.view(torch.int16)
    return bool(np.array_equal(a.numpy(), b.numpy()))


def copy_export(source: Path, to: Path, **config: Any) -> Path:
    """A hand-made folder: the weights and config.json of an export, no manifest.

    Args:
        source: The export.
        to: The new folder.
        config: Changes of config.json; ``...`` removes a key.
    """
    to.mkdir()
    content = json.loads((source / "config.json").read_text()) | config
    content = {k: v for k, v in content.items() if v is not ...}
    (to / "config.json").write_text(json.dumps(content))
    save_file(
        load_file(source / "model.safetensors"),
        to / "model.safetensors",
        {"format": "pt"},
    )
    return to


def rename_tensors(folder: Path, renames: dict[str, str]) -> Path:
    """Give tensors of a hand-made folder other names: prefix -> prefix."""
    path = folder / "model.safetensors"
    held = load_file(path)

    def renamed(name: str) -> str:
        for old, new in renames.items():
            if name.startswith(old):
                return new + name.removeprefix(old)
        return name

    save_file({renamed(k): v for k, v in held.items()}, path, {"format": "pt"})
    return folder


def names_of(folder: Path) -> set[str]:
    """The names in a folder's weight files, by the library's own reader."""
    found: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "np") as handle:
            found |= set(handle.keys())
    return found
