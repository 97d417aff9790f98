"""The table of what each release made of each folder."""

from __future__ import annotations

import pytest

TABLE = pytest.StashKey[dict[str, dict[str, str]]]()


@pytest.fixture
def table(request: pytest.FixtureRequest) -> dict[str, dict[str, str]]:
    """Folder -> release -> what became of its tensors."""
    return request.config.stash.setdefault(TABLE, {})


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print folder x release: landed / dropped / unset, or why SGLang refuses."""
    rows = config.stash.get(TABLE, {})
    if not rows:
        return
    releases = list(dict.fromkeys(r for row in rows.values() for r in row))
    cells = {f: [row.get(r, "") for r in releases] for f, row in rows.items()}
    wide = [
        max(len(r), *(len(c[i]) for c in cells.values()))
        for i, r in enumerate(releases)
    ]
    first = max(map(len, rows))
    terminalreporter.section("landed/dropped/unset in SGLang, equal to the template's")
    for name, columns in {"": releases, **cells}.items():
        line = "  ".join(c.ljust(w) for c, w in zip(columns, wide, strict=True))
        terminalreporter.write_line(f"{name:<{first}}  {line}".rstrip())
