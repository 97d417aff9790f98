"""The recipes of the other families: `check` says yes, and what cannot be served no."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from speculators.train.config import TrainConfig
from transformers import Gemma4TextConfig

from spec_export.check import check_recipe
from spec_export.findings import SpecExportError
from spec_export.layout.catalog import families

ROOT = Path(__file__).parents[2]
TARGETS = ROOT / "tests" / "fixtures" / "targets"
# recipe -> folder of its target, class, lowest release, algorithm
REAL = {
    "qwen3_8b_dflash": ("qwen3_8b", "DFlashDraftModel", "0.5.13", "DFLASH"),
    "qwen3_8b_dflash2": ("qwen3_8b", "DFlash2DraftModel", "0.5.19", "DFLASH"),
    "qwen3_8b_dspark": ("qwen3_8b", "Qwen3DSparkModel", "0.5.16", "DSPARK"),
    "qwen3_next_mtp": ("qwen3_next_80b", "Qwen3NextForCausalLMMTP", "0.5.2", "NEXTN"),
}


@pytest.mark.parametrize("name", REAL)
def test_check_says_yes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    folder, architecture, since, algorithm = REAL[name]
    result = check_recipe(ROOT / "recipes" / f"{name}.yaml", target=TARGETS / folder)
    assert result.plan.ok, result.findings
    assert (result.plan.architecture, result.plan.min_version) == (architecture, since)
    assert result.plan.launch[:2] == ["--speculative-algorithm", algorithm]
    severities = {str(f.severity) for f in result.findings}
    assert severities <= ({"warning"} if algorithm == "NEXTN" else set())


@pytest.mark.parametrize("name", REAL)
@pytest.mark.filterwarnings("error::UserWarning")
def test_plain_speculators_takes_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    path = ROOT / "recipes" / f"{name}.yaml"
    config = TrainConfig.from_sources(cli={}, config_path=str(path), argv=[])
    assert config.speculator_type == name.split("_")[-1]


def test_every_family_has_a_recipe_that_runs_or_is_checked() -> None:
    kinds = {
        yaml.safe_load(path.read_text())["train"]["speculator_type"]
        for path in (ROOT / "recipes").glob("*.yaml")
    }
    assert kinds == set(families())


def _recipe(tmp_path: Path, kind: str, **draft: object) -> Path:
    content = yaml.safe_load((ROOT / "recipes" / "qwen3_8b_dflash.yaml").read_text())
    content["train"]["speculator_type"] = kind
    content["train"]["draft"] |= draft
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.parametrize(
    ("kind", "instead"),
    [("peagle", "eagle3 or dflash"), ("xpress", "dflash or dspark")],
)
def test_check_says_before_training_what_to_train_instead(
    tmp_path: Path, kind: str, instead: str
) -> None:
    result = check_recipe(_recipe(tmp_path, kind), target=TARGETS / "qwen3_8b")
    (found,) = [f for f in result.findings if str(f.severity) == "error"]
    assert found.code == "family-unsupported" and kind in found.message
    assert instead in (found.hint or "")


def test_check_refuses_the_default_window(tmp_path: Path) -> None:
    path = _recipe(tmp_path, "dflash", full_attention_indices=[])
    result = check_recipe(path, target=TARGETS / "qwen3_8b")
    assert "sliding-window-extent" in {f.code for f in result.findings}
    assert not result.plan.ok
    allowed = check_recipe(
        path, target=TARGETS / "qwen3_8b", allow=["sliding-window-extent"]
    )
    assert allowed.plan.ok


def _gemma(folder: Path) -> Path:
    """The sizes of a Gemma-4 of 42 layers, which is 2560 wide; no weights."""
    config = Gemma4TextConfig(
        hidden_size=2560,
        num_hidden_layers=42,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=10240,
        max_position_embeddings=40960,
        architectures=["Gemma4ForCausalLM"],
    )
    config.save_pretrained(folder)
    return folder


def test_check_of_a_target_that_scales_its_embedding(tmp_path: Path) -> None:
    gemma = _gemma(tmp_path / "gemma")
    result = check_recipe(_recipe(tmp_path, "dflash"), target=gemma)
    errors = [f for f in result.findings if f.severity == "error"]
    assert [f.code for f in errors] == ["embedding-scale-rounded"]
    assert "50.5964" in errors[0].message
    allowed = check_recipe(
        _recipe(tmp_path, "dflash"), target=gemma, allow=["embedding-scale-rounded"]
    )
    assert allowed.plan.ok, allowed.findings
    assert allowed.plan.config["rms_norm_eps"] == pytest.approx(2560e-6)
    assert allowed.plan.min_version == "0.5.14"
    result = check_recipe(_recipe(tmp_path, "dspark"), target=gemma)
    assert "target-unsupported" in {
        f.code for f in result.findings if f.severity == "error"
    }


def test_check_names_the_place_of_an_option(tmp_path: Path) -> None:
    """The recipe's key, unless the command line has it too, which wins."""
    path = _recipe(tmp_path, "dflash")
    content = yaml.safe_load(path.read_text())
    arguments = content["callbacks"][0]["init_args"]
    arguments["sglang"] = "9.0"
    path.write_text(yaml.safe_dump(content))
    target, place = TARGETS / "qwen3_8b", "callbacks[0].init_args"

    def subjects(**options: str) -> set[str]:
        found = check_recipe(path, target=target, **options).findings  # type: ignore[arg-type]
        return {f.subject for f in found if f.code == "release-unknown"}

    assert subjects() == {f"{place}.sglang"}
    assert subjects(sglang="9.1") == {"--sglang"}
    path.write_text(yaml.safe_dump(content | {"callbacks": []}))
    assert subjects(sglang="9.1") == {"--sglang"}
    arguments |= {"plugin": "always"}
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(SpecExportError) as caught:
        check_recipe(path, target=target)
    assert [f.subject for f in caught.value.findings] == [f"{place}.plugin"]
    with pytest.raises(SpecExportError) as caught:
        check_recipe(path, target=target, plugin="always")
    assert [f.subject for f in caught.value.findings] == ["--plugin"]
