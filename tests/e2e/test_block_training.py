"""The CPU-sized recipes of block drafts: trained, exported, finished, verified."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from spec_export.training import launch
from tests.helpers.cli import spec_export
from tests.helpers.tiny import Tiny

SERVED = {
    "dflash": ("Qwen3DSparkModel", "DSPARK"),  # it has a draft vocabulary
    "dflash2": ("DFlash2DraftModel", "DFLASH"),
    "dspark": ("Qwen3DSparkModel", "DSPARK"),
}


def _recipe(kind: str, tiny: Tiny, tmp_path: Path) -> Path:
    """The shipped recipe with this machine's paths."""
    content = tiny.shipped(f"tiny_{kind}_cpu", tmp_path)
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.parametrize("kind", SERVED)
def test_the_tiny_recipe(kind: str, tiny: Tiny, tmp_path: Path) -> None:
    path = _recipe(kind, tiny, tmp_path)
    assert launch.main(["--config", str(path), "--max-steps", "4"]) == 0
    folder = tmp_path / "exports" / "latest"
    manifest = json.loads((folder / "spec_export_manifest.json").read_text())
    serving, legs = manifest["serving"], manifest["comparison"]
    assert (serving["architecture"], serving["algorithm"]) == SERVED[kind]
    assert {name: legs[name]["verdict"] for name in ("cast", "layout")} == {
        "cast": "pass",
        "layout": "pass",
    }
    assert max(step["max_rel"] for step in legs["layout"]["metrics"]) <= 1e-5
    roles = {name: entry["role"] for name, entry in manifest["tensors"].items()}
    assert roles["fc.weight"] == "trained"
    if kind == "dflash":
        assert roles["markov_head.markov_w2.weight"] == "derived"
    final = spec_export("finalize", tmp_path / "exports", "--target", tiny.target)
    assert final.code == 0, final.data["findings"]
    assert final.data["verdict"] == "pass"
    verified = spec_export(
        "verify", final.data["output"], "--target", tiny.target, "--compare"
    )
    assert verified.code == 0, verified.data["findings"]
