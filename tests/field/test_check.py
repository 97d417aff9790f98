"""Cases that `check` sees before any training: the recipe is enough."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.field.desk import Desk
from tests.field.test_cases import IDS, NEVER
from tests.helpers.field import DRAFT, make_target

LAYER = "transformer_layer_config"


def recipe(desk: Desk, target: Path | None = None, **draft: Any) -> Path:
    """A recipe that trains E0, with changes of its ``draft`` block."""
    content = {
        "train": {
            "verifier": {"verifier_name_or_path": str(target or desk.target)},
            "draft": {
                "draft_vocab_size": DRAFT,
                "norm_before_residual": False,
                "norm_before_fc": False,
                "norm_output": False,
                "full_attention_indices": [0],
                "target_layer_ids": [1, 3, 4],
                **draft,
            },
            "trainer": {"save_path": str(desk.root / "run")},
        }
    }
    path = desk.new("recipe").with_suffix(".yaml")
    path.write_text(yaml.safe_dump(content))
    return path


def test_a_recipe_that_exports_nothing_is_told(desk: Desk) -> None:
    path = recipe(desk)
    answer = desk.ok("check no callbacks", desk.run("check", path))
    (told,) = [f for f in answer.data["findings"] if f["code"] == "callbacks-missing"]
    assert told["severity"] == "info" and path.name in told["message"]
    exporter = {"class_path": "spec_export.SGLangExport"}
    exporter["init_args"] = {"output_dir": str(desk.root / "exports")}
    content = yaml.safe_load(path.read_text()) | {"callbacks": [exporter]}
    path.write_text(yaml.safe_dump(content))
    answer = desk.ok("check callbacks", desk.run("check", path))
    assert "callbacks-missing" not in {f["code"] for f in answer.data["findings"]}


def test_a_recipe_that_can_be_served(desk: Desk) -> None:
    for release in ("0.5.9", "0.5.23"):
        answer = desk.run("check", recipe(desk), "--sglang", release)
        if release == "0.5.9":
            desk.warned("check 2 old", answer, IDS, "0.5.11")
        else:
            desk.ok("check 2 new", answer)
    assert not (desk.root / "run").exists()


@pytest.mark.parametrize(
    "case, draft, options, subject, says",
    [
        (
            "13 true",
            {"norm_before_residual": True},
            NEVER,
            "norm_before_residual",
            "true",
        ),
        (
            "17 (f)",
            {"draft_arch": "qwen3"},
            NEVER,
            "layers.0.self_attn.q_norm.weight",
            "drops",
        ),
        (
            "10 (b) old",
            {"target_layer_ids": [1, 2, 3, 4]},
            ("--sglang", "0.5.9"),
            IDS,
            "0.5.12",
        ),
        (
            "10 (e) 0.5.21",
            {"target_layer_ids": [0, 3, 5]},
            ("--sglang", "0.5.21"),
            IDS,
            "0.5.22",
        ),
        ("10 (c)", {"target_layer_ids": [2, 4, 6]}, (), IDS, "id 6"),
        (
            "norm_before_fc, 0.5.16",
            {"norm_before_fc": True},
            ("--sglang", "0.5.16", *NEVER),
            "norm_before_fc",
            "0.5.17",
        ),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_recipes_that_cannot(
    desk: Desk,
    case: str,
    draft: dict[str, Any],
    options: tuple[str, ...],
    subject: str,
    says: str,
) -> None:
    answer = desk.run("check", recipe(desk, **draft), *options)
    desk.fails(f"check {case}", answer, subject, says)


def test_the_plug_in_serves_what_speculators_trains_by_default(desk: Desk) -> None:
    path = recipe(desk, norm_before_residual=True, norm_before_fc=True)
    answer = desk.ok("check 13 true, plug-in", desk.run("check", path))
    assert answer.data["requires_plugin"] is True


def test_a_tied_target_and_one_that_is_not_there(desk: Desk) -> None:
    tied = make_target(desk.root / "T1", tied=True, weights=False)
    answer = desk.run("check", recipe(desk, tied))
    desk.ok("check 5 tied target", answer)
    assert "tie_word_embeddings" not in {f["subject"] for f in answer.of("error")}
    answer = desk.run("check", recipe(desk, desk.root / "nobody"))
    assert answer.code in (1, 2)
    assert any("nobody" in f["message"] for f in answer.of("error"))
