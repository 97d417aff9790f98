"""A draft, an output_dir with two exports, and the table of what happened."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.faults.export_once import export_once, finals
from tests.helpers.field import (
    draft_config,
    draft_tensors,
    make_draft,
    make_target,
    write_draft,
)
from tests.helpers.tiny import REPOSITORY

TABLE: list[tuple[str, str]] = []


@dataclass
class Desk:
    """What the trials start from.

    Attributes:
        source: The checkpoint that is exported.
        template: An output_dir with exports of steps 1 and 2 of other weights.
        finals: A saved export of the checkpoint and a final one of other weights.
    """

    root: Path
    target: Path
    source: Path
    template: Path
    finals: Path
    _process: subprocess.Popen[str] | None = field(default=None)
    _count: int = 0

    def trial(self, **more: Any) -> dict[str, Any]:
        """Copy the template, let an export go wrong in it, say what is left."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.export_once"],
                cwd=REPOSITORY,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=(self.root / "stderr").open("w"),
                text=True,
            )
        self._count += 1
        trial = {
            "source": str(self.source),
            "target": str(self.target),
            "output_dir": str(self.root / f"out-{self._count}"),
            **more,
        }
        assert self._process.stdin is not None and self._process.stdout is not None
        template = self.template if "act" not in more else self.finals
        job = {"template": str(template), "trial": trial}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, self.stderr()
        found = json.loads(line)
        assert isinstance(found, dict)
        return found | {"output_dir": trial["output_dir"]}

    def stderr(self) -> str:
        return (self.root / "stderr").read_text()[-3000:]

    def calls(self, **more: Any) -> list[str]:
        """The calls of an export to which nothing happens, in order."""
        found = self.trial(log=True, **more)
        assert (found["code"], found["outcome"]) == (0, "new"), found["said"]
        return Path(f"{found['output_dir']}.log").read_text().splitlines()

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(30)


@pytest.fixture(scope="session")
def desk() -> Iterator[Desk]:
    # Not below pytest's folder, which it keeps closed to other users.
    root = Path(tempfile.mkdtemp(prefix="spec-export-faults-"))
    root.chmod(0o755)
    target = make_target(root / "target")
    old = make_draft(root / "old", target)
    tensors = draft_tensors(target)
    tensors["fc.weight"] = tensors["fc.weight"] * 1.5
    new = write_draft(root / "new", draft_config(target), tensors)
    for file in root.rglob("*.safetensors"):
        file.chmod(0o644)
    template = root / "template"
    template.mkdir()
    for step in (1, 2):
        export_once(old, target, template, step)
    saved_and_final = root / "finals"
    saved_and_final.mkdir()
    finals(old, new, target, saved_and_final)
    desk = Desk(root, target, new, template, saved_and_final)
    try:
        yield desk
    finally:
        desk.close()
        shutil.rmtree(root)


@pytest.fixture
def row() -> Any:
    """Add a line to the table that ends the run."""

    def add(fault: str, outcome: str) -> None:
        TABLE.append((fault, outcome))

    return add


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if TABLE:
        terminalreporter.section("faults and outcomes")
        width = max(len(fault) for fault, _ in TABLE)
        for fault, outcome in TABLE:
            terminalreporter.write_line(f"{fault:<{width}}  {outcome}")
