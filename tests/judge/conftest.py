"""What the tests of the judge share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from loguru import logger

from tests.helpers import field
from tests.helpers.judging import finalized

# `drafts` beside the tests, with --import-mode=importlib.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    """No engine, whatever the environment names, and no lines for every file."""
    logger.disable("speculators")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPEC_EXPORT_SGLANG_PYTHON", "")
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An export that passed, and its target."""
    root = tmp_path_factory.mktemp("finished")
    target = field.make_target(root / "target")
    checkpoint = field.make_draft(root / "checkpoint", target)
    assert finalized(checkpoint, target, root / "export").code == 0
    return root / "export", target
