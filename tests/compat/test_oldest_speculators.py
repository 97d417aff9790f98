"""A draft of each family all the way, trained by the oldest release that we support.

The rest of what runs under it are ``tests/e2e/test_training_hook.py``: the events, and
that each snapshot has the bytes of the trainer's own files; and
``tests/e2e/test_mtp_training.py``, the family that needs a target of its own.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.numpy import load_file

from spec_export.training import launch
from tests.helpers.cli import Ran, spec_export
from tests.helpers.tiny import Tiny

# What pyproject.toml allows and requirements/constraints-0.8.1.txt pins.
OLDEST = "0.8.1"
TOLERANCE = 1e-5
FAMILIES = {
    "tiny_cpu": "LlamaForCausalLMEagle3",
    "tiny_dflash_cpu": "Qwen3DSparkModel",  # it has a draft vocabulary
    "tiny_dflash2_cpu": "DFlash2DraftModel",
    "tiny_dspark_cpu": "Qwen3DSparkModel",
}


def recipe(name: str, tiny: Tiny, root: Path) -> Path:
    """A shipped recipe with this machine's paths."""
    content = tiny.shipped(name, root)
    content["train"]["trainer"]["epochs"] = 1
    path = root / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def passes(ran: Ran) -> dict[str, Any]:
    assert ran.code == 0, ran.data["findings"]
    return ran.data


def test_this_is_the_oldest_release() -> None:
    assert version("speculators") == version("hs-connectors") == OLDEST


@pytest.mark.parametrize("name", FAMILIES)
def test_a_tiny_recipe_all_the_way(name: str, tiny: Tiny, tmp_path: Path) -> None:
    path = recipe(name, tiny, tmp_path)
    passes(spec_export("check", path))
    assert launch.main(["--config", str(path), "--max-steps", "3"]) == 0
    folder = tmp_path / "exports" / "latest"
    written = json.loads((folder / "spec_export_manifest.json").read_text())
    assert written["training"]["speculators_version"] == OLDEST
    assert written["training"]["global_step"] == 3
    assert written["serving"]["architecture"] == FAMILIES[name]
    legs = written["comparison"]
    assert [legs[leg]["verdict"] for leg in ("cast", "layout")] == ["pass", "pass"]
    assert max(step["max_rel"] for step in legs["layout"]["metrics"]) <= TOLERANCE
    assert written["tensors"]["fc.weight"]["changed_in_training"] is True

    # The trainer's own checkpoint of the same weights gives the same bytes.
    again = tmp_path / "again"
    checkpoint = tmp_path / "run" / "0"
    found = passes(spec_export("finalize", checkpoint, "--output", again))
    assert found["verdict"] == "pass"
    live, saved = (load_file(f / "model.safetensors") for f in (folder, again))
    assert sorted(live) == sorted(saved)
    assert all(live[key].tobytes() == saved[key].tobytes() for key in live)

    final = passes(
        spec_export("finalize", tmp_path / "exports", "--target", tiny.target)
    )
    assert final["verdict"] == "pass"
    passes(spec_export("verify", final["output"], "--target", tiny.target, "--compare"))
    shown = spec_export("doctor")
    assert "speculators" not in [f["subject"] for f in shown.data["findings"]]
