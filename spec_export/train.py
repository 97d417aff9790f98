"""``python -m spec_export.train`` and ``torchrun -m spec_export.train``."""

from __future__ import annotations

from spec_export.training.launch import main

if __name__ == "__main__":
    raise SystemExit(main())
