"""The recipes for people: plain speculators takes them, and they fit their targets."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml
from speculators.train.cli import (
    create_transformer_layer_config,
    load_draft_transformer_layer_config,
)
from speculators.train.config import TrainConfig
from transformers import AutoConfig, LlamaConfig, PretrainedConfig

from spec_export.check import check_recipe

ROOT = Path(__file__).parents[2]
TARGETS = ROOT / "tests" / "fixtures" / "targets"
# recipe -> folder of its target, layers, vocabulary, layer ids, query width
REAL = {
    "llama31_8b_eagle3_offline": ("llama31_8b", 32, 128256, [2, 16, 29], 4096),
    "llama31_8b_eagle3_online": ("llama31_8b", 32, 128256, [2, 16, 29], 4096),
    "qwen3_8b_eagle3_offline": ("qwen3_8b", 36, 151936, [2, 18, 33], 4096),
    "qwen3_8b_eagle3_online": ("qwen3_8b", 36, 151936, [2, 18, 33], 4096),
    "kimi_k25_eagle3": ("kimi_k25", 61, 163840, [2, 30, 58], 8192),
}


def read(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def resolve(path: Path) -> TrainConfig:
    """As `speculators train --config` resolves it; a warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return TrainConfig.from_sources(cli={}, config_path=str(path), argv=[])


def text_config(folder: Path) -> PretrainedConfig:
    return AutoConfig.from_pretrained(folder).get_text_config()


def draft_layer(cfg: TrainConfig, target: Path) -> PretrainedConfig:
    """The decoder configuration that speculators would give the draft."""
    if cfg.draft.draft_config:
        return load_draft_transformer_layer_config(cfg.draft.draft_config, str(target))
    return create_transformer_layer_config(
        str(target),
        cfg.draft.num_layers,
        cfg.draft.draft_arch,
        cfg.draft.draft_hidden_act,
        cfg.draft.sliding_window,
        cfg.draft.full_attention_indices,
    )


def test_every_real_recipe_is_in_the_table() -> None:
    assert {path.stem for path in (ROOT / "recipes").glob("*_eagle3*.yaml")} == set(
        REAL
    )


@pytest.mark.parametrize("name", REAL)
def test_speculators_takes_it_without_a_warning(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    cfg = resolve(ROOT / "recipes" / f"{name}.yaml")
    _, layers, vocab, ids, _ = REAL[name]
    draft = cfg.draft
    assert cfg.speculator_type == "eagle3"
    assert draft.target_layer_ids == ids == [2, layers // 2, layers - 3]
    assert draft.norm_before_residual is False
    assert draft.draft_arch == "llama"
    assert draft.embed_requires_grad is False
    assert (draft.norm_before_fc, draft.fc_norm, draft.norm_output) == (
        True,
        False,
        True,
    )
    assert draft.draft_vocab_size % 64 == 0
    assert draft.draft_vocab_size < vocab
    # Offline means that no server is asked.
    assert (cfg.generation.on_missing == "raise") == name.endswith("offline")


def test_an_unknown_key_would_be_seen(tmp_path: Path) -> None:
    recipe = read(ROOT / "recipes" / "qwen3_8b_eagle3_online.yaml")
    recipe["train"]["draft"]["norm_before_residuals"] = False
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    with pytest.raises(UserWarning, match="norm_before_residuals"):
        resolve(path)


@pytest.mark.parametrize("name", REAL)
def test_callbacks_stand_beside_train(name: str) -> None:
    recipe = read(ROOT / "recipes" / f"{name}.yaml")
    assert set(recipe) == {"train", "callbacks"}
    (callback,) = recipe["callbacks"]
    assert callback["class_path"] == "spec_export.SGLangExport"
    output = Path(callback["init_args"]["output_dir"])
    save_path = Path(recipe["train"]["trainer"]["save_path"])
    assert save_path not in [output, *output.parents]


@pytest.mark.parametrize("name", REAL)
def test_draft_fits_its_target(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer that speculators would build, on a copy of the target's shapes."""
    monkeypatch.chdir(ROOT)
    folder, layers, vocab, _, query_width = REAL[name]
    target = text_config(TARGETS / folder)
    layer = draft_layer(resolve(ROOT / "recipes" / f"{name}.yaml"), TARGETS / folder)
    assert isinstance(layer, LlamaConfig)
    assert (target.num_hidden_layers, target.vocab_size) == (layers, vocab)
    assert layer.hidden_size == target.hidden_size
    assert layer.vocab_size == vocab
    assert layer.num_attention_heads * layer.head_dim == query_width
    # SGLang refuses a draft whose context is below the target's.
    assert layer.max_position_embeddings == target.max_position_embeddings
    assert layer.hidden_act == "silu"
    rope = {"llama31_8b": "llama3", "qwen3_8b": "default", "kimi_k25": "default"}
    assert layer.rope_parameters["rope_type"] == rope[folder]
    windows = set(getattr(layer, "layer_types", None) or ["full_attention"])
    assert windows == {
        "sliding_attention" if folder == "qwen3_8b" else "full_attention"
    }


@pytest.mark.parametrize("name", REAL)
def test_check_says_yes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    folder, _, vocab, ids, _ = REAL[name]
    result = check_recipe(
        ROOT / "recipes" / f"{name}.yaml", target=TARGETS / folder, sglang="0.5.17"
    )
    plan = result.plan
    window = folder == "qwen3_8b"
    # No token map exists before prepare-data has run.
    assert {finding.code for finding in result.findings} == {"vocab-map-absent"} | (
        {"sliding-window-flag"} if window else set()
    )
    assert plan.ok
    assert plan.min_version == "0.5.17"
    assert plan.architecture == "LlamaForCausalLMEagle3"
    assert plan.vocab == {"draft_size": 32000, "target_size": vocab}
    written = plan.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert written == [layer - 1 for layer in ids]
    launch = " ".join(plan.launch)
    assert "--speculative-num-steps 3 --speculative-eagle-topk 1" in launch
    assert "--speculative-num-draft-tokens 4" in launch
    assert ("--speculative-draft-window-size 2047" in launch) == window


def test_check_says_no_one_release_earlier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    result = check_recipe(
        ROOT / "recipes" / "kimi_k25_eagle3.yaml",
        target=TARGETS / "kimi_k25",
        sglang="0.5.16",
        plugin="never",
    )
    assert not result.plan.ok
    assert "release-too-old" in {finding.code for finding in result.findings}


@pytest.mark.parametrize("folder", sorted(p.name for p in TARGETS.glob("*/")))
def test_target_fixture_loads_as_what_it_says(folder: str) -> None:
    written = json.loads((TARGETS / folder / "config.json").read_text("utf-8"))
    loaded = AutoConfig.from_pretrained(TARGETS / folder)
    assert loaded.architectures == written["architectures"]
    assert loaded.model_type == written["model_type"]
    text = written.get("text_config", written)
    for key in ("hidden_size", "num_hidden_layers", "vocab_size"):
        assert getattr(loaded.get_text_config(), key) == text[key]
    # Their absence is the point: nothing here may be taken for a model.
    assert [p.name for p in (TARGETS / folder).iterdir()] == ["config.json"]
