"""Let SGLang's imports succeed on a CPU-only PyTorch; read by Python at start-up.

This folder stands first on ``PYTHONPATH`` of every process that runs SGLang in
the serving tests. PyPI's torchvision is linked against CUDA: beside a PyTorch
without CUDA its C extension does not load, and then its own Python part fails,
because it registers shape functions for two operators that nobody declared. The
finder below declares them, only where the extension really cannot be loaded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType


class _TorchvisionOperators(MetaPathFinder):
    """Acts once, just before torchvision is imported, and finds nothing itself."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Declare torchvision's operators if its extension cannot, then step aside."""
        if fullname != "torchvision":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.origin and not _loads(Path(spec.origin).parent):
            _declare_operators()
        return None


def _loads(package: Path) -> bool:
    """Whether the C extension in a torchvision folder can be loaded (and load it)."""
    import torch

    try:
        for library in package.glob("_C*.so"):
            torch.ops.load_library(str(library))
    except OSError:
        return False
    return True


def _declare_operators() -> None:
    import torch

    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _KEPT.append(library)  # a collected Library takes its operators with it


_KEPT: list[object] = []
sys.meta_path.insert(0, _TorchvisionOperators())
if os.environ.get("SPEC_EXPORT_BLOCK_DRAFTS") == "1":
    import block_drafts

    block_drafts.install()
