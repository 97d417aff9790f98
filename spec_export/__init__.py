"""spec-export: speculators drafts, in the layout that SGLang loads, with proof."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spec_export.artifact.manifest import Manifest
    from spec_export.training.attach import attach
    from spec_export.training.callback import SGLangExport

__version__ = "0.1.0"
__all__ = ["SGLangExport", "__version__", "attach", "read_manifest"]


def read_manifest(folder: str) -> Manifest:
    """Read the manifest of an export.

    Raises:
        SpecExportError: when the folder has none or it cannot be read.
    """
    from spec_export.artifact.manifest import Manifest

    return Manifest.read(folder)


def __getattr__(name: str) -> Any:
    # Training pulls in torch and speculators; a deployer has neither.
    if name == "SGLangExport":
        from spec_export.training.callback import SGLangExport

        return SGLangExport
    if name == "attach":
        from spec_export.training.attach import attach

        return attach
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
