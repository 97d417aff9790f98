"""The oldest release of speculators that we train with; see `make test-compat`."""

from __future__ import annotations

import pytest

from tests.helpers.tiny import Tiny, make_tiny


@pytest.fixture(scope="session")
def tiny() -> Tiny:
    """The tiny target with data for epochs of a few steps."""
    return make_tiny()
