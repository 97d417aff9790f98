from __future__ import annotations

import sys
from pathlib import Path

# `drafts` beside the tests, with --import-mode=importlib.
sys.path.insert(0, str(Path(__file__).parent))
