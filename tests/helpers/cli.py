"""Runs the command line in this process and reads its one JSON object."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass
from typing import Any

from spec_export import cli


@dataclass
class Ran:
    """What one command did."""

    code: int
    data: dict[str, Any]
    stderr: str

    def codes(self, severity: str | None = None) -> list[str]:
        """Codes of its findings."""
        return [
            f["code"]
            for f in self.data["findings"]
            if severity in (None, f["severity"])
        ]

    def finding(self, code: str) -> dict[str, Any]:
        """The first finding of a code."""
        return next(f for f in self.data["findings"] if f["code"] == code)


def spec_export(*argv: object) -> Ran:
    """Run ``spec-export ... --json``; stdout has to be one JSON object."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.run([*map(str, argv), "--json"])
    data = json.loads(out.getvalue())
    assert isinstance(data, dict)
    assert data["ok"] == (code == 0)
    return Ran(code, data, err.getvalue())
