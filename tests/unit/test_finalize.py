"""``spec-export finalize``: which source is taken, what is finished, what stays."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from spec_export import read_manifest
from tests.helpers import field
from tests.helpers.cli import spec_export


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return field.make_target(tmp_path / "T0")


@pytest.fixture
def draft(tmp_path: Path, target: Path) -> Path:
    return field.make_draft(tmp_path / "E0", target)


def test_a_bare_checkpoint_becomes_a_final_export(draft: Path, tmp_path: Path) -> None:
    ran = spec_export("finalize", draft, "--output", tmp_path / "out")
    assert ran.code == 0, ran.data
    assert ran.data["source_kind"] == "checkpoint"
    assert ran.data["verdict"] == "pass"
    assert ran.data["requires_plugin"] is False
    manifest = read_manifest(str(tmp_path / "out"))
    assert manifest.status == "final"
    layout = manifest.comparison["layout"]
    assert max(step["max_rel"] for step in layout.metrics) <= 1e-5
    assert layout.steps == 3 and layout.positions == 256
    assert manifest.comparison["engine"].verdict == "not run"
    assert "speculative-draft-model-path" in (tmp_path / "out/README.md").read_text()
    verified = spec_export("verify", tmp_path / "out")
    assert verified.code == 0, verified.data
    assert verified.data["status"] == "final"


def test_every_row_of_a_card_is_one_line(tmp_path: Path) -> None:
    target = field.make_target(tmp_path / "T0")
    draft = field.make_draft(tmp_path / "E0", target, norm_before_residual=True)
    out = tmp_path / "out"
    assert spec_export("finalize", draft, "--output", out, "--no-compare").code == 0
    card = (out / "README.md").read_text()
    assert "| plug-in | `pip install spec-export` on the server |\n| status |" in card
    table = card.split("## Serve")[0].split("|---|---|\n")[1].strip()
    assert all(r.startswith("| ") and r.endswith(" |") for r in table.splitlines())


def test_a_cast_is_one_line(draft: Path, tmp_path: Path) -> None:
    argv = ("finalize", draft, "--no-compare", "--dtype")
    wide = spec_export(*argv, "float32", "--output", tmp_path / "wide")
    assert wide.codes().count("dtype-cast") == 1
    assert "no value changes" in wide.finding("dtype-cast")["message"]


def test_twice_in_a_row_changes_no_weight(draft: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert spec_export("finalize", draft, "--output", out).code == 0
    before = {p.name: p.stat().st_mtime_ns for p in out.glob("*.safetensors")}
    ran = spec_export("finalize", out)
    assert ran.code == 0, ran.data
    assert ran.data["source_kind"] == "export"
    assert {p.name: p.stat().st_mtime_ns for p in out.glob("*.safetensors")} == before
    assert spec_export("verify", out).code == 0


def test_an_export_can_be_finished_elsewhere(draft: Path, tmp_path: Path) -> None:
    out, copy = tmp_path / "out", tmp_path / "copy"
    assert spec_export("finalize", draft, "--output", out, "--no-compare").code == 0
    ran = spec_export("finalize", out, "--output", copy)
    assert ran.code == 0, ran.data
    assert spec_export("verify", copy).code == 0
    assert spec_export("diff", out, copy).code == 0


def test_output_is_needed_for_a_checkpoint(draft: Path) -> None:
    ran = spec_export("finalize", draft)
    assert (ran.code, ran.codes("error")) == (2, ["option-invalid"])


def test_a_run_gives_its_best_checkpoint_and_says_so(
    draft: Path, target: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    for epoch in (0, 1, 2):
        field.make_draft(run / str(epoch), target)
    (run / "checkpoint_best").symlink_to("1")
    ran = spec_export("finalize", run, "--output", tmp_path / "a", "--no-compare")
    assert ran.code == 0, ran.data
    assert Path(ran.data["source"]).name == "1"
    (run / "checkpoint_best").unlink()
    (run / "2" / "model.safetensors").write_bytes(b"torn")
    ran = spec_export("finalize", run, "--output", tmp_path / "b", "--no-compare")
    assert ran.code == 0, ran.data
    assert Path(ran.data["source"]).name == "1"
    assert "checkpoint-incomplete" in ran.codes()


@pytest.mark.parametrize("inside", ["copy", "probe/copy"])
def test_an_export_holds_no_other_one(draft: Path, tmp_path: Path, inside: str) -> None:
    """Its manifest would not list it, and ``verify`` would call it a stranger."""
    outer = tmp_path / "out"
    assert spec_export("finalize", draft, "--output", outer, "--no-compare").code == 0
    place = outer / inside
    for more in ([], ["--force"]):
        ran = spec_export("finalize", draft, "--output", place, "--no-compare", *more)
        assert (ran.code, ran.codes("error")) == (2, ["option-invalid"])
        assert str(outer) in ran.finding("option-invalid")["message"]
        assert not place.exists()
    beside = outer.with_name("out.2")
    assert spec_export("finalize", draft, "--output", beside, "--no-compare").code == 0


def test_force_replaces_and_a_refusal_leaves_the_old_one(
    draft: Path, target: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert spec_export("finalize", draft, "--output", out, "--no-compare").code == 0
    taken = spec_export("finalize", draft, "--output", out, "--no-compare")
    assert (taken.code, taken.codes("error")) == (2, ["output-exists"])
    before = (out / "spec_export_manifest.json").read_bytes()
    bad = field.draft_tensors(target)
    bad["fc.weight"][0, 0] = float("nan")
    broken = field.write_draft(tmp_path / "bad", field.draft_config(target), bad)
    ran = spec_export("finalize", broken, "--output", out, "--force", "--no-compare")
    assert (ran.code, ran.codes("error")) == (1, ["non-finite"])
    assert (out / "spec_export_manifest.json").read_bytes() == before
    again = spec_export("finalize", draft, "--output", out, "--force", "--no-compare")
    assert again.code == 0, again.data
    leftovers = [p.name for p in tmp_path.iterdir() if p.name.startswith(".")]
    assert leftovers == []


def test_a_relative_target_is_found_beside_the_checkpoint(
    target: Path, tmp_path: Path
) -> None:
    draft = field.make_draft(tmp_path / "E0", target)
    config = json.loads((draft / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = "T0"
    (draft / "config.json").write_text(json.dumps(config))
    ran = spec_export("finalize", draft, "--output", tmp_path / "a", "--no-compare")
    assert ran.code == 0 and "target-path-relative" in ran.codes("info")
    elsewhere = tmp_path / "far" / "E0"
    shutil.copytree(draft, elsewhere)
    shutil.move(target, tmp_path / "moved")
    ran = spec_export("finalize", elsewhere, "--output", tmp_path / "b")
    assert ran.code == 1 and "target-needed" in ran.codes("error")
    assert "--target" in ran.finding("target-needed")["hint"]


def test_a_target_without_weights_is_a_warning_and_its_facts_are_null(
    tmp_path: Path,
) -> None:
    target = field.make_target(tmp_path / "T0", weights=False)
    draft = field.make_draft(tmp_path / "E0", target)
    ran = spec_export("finalize", draft, "--output", tmp_path / "out")
    assert ran.code == 0, ran.data
    assert "target-weights-missing" in ran.codes("warning")
    manifest = read_manifest(str(tmp_path / "out"))
    assert manifest.target_model.digests.embedding is None
    assert manifest.tensors["lm_head.weight"].role is None


def test_another_target_is_told_even_if_finalize_saw_none(tmp_path: Path) -> None:
    target = field.make_target(tmp_path / "T0", weights=False)
    whole = field.make_target(tmp_path / "whole")
    draft = field.write_draft(
        tmp_path / "E0", field.draft_config(target), field.draft_tensors(whole)
    )
    out = tmp_path / "out"
    assert spec_export("finalize", draft, "--output", out, "--no-compare").code == 0
    assert spec_export("verify", out, "--target", whole).code == 0
    other = field.make_target(tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    save_file({k: v + 1 for k, v in weights.items()}, other / "model.safetensors")
    ran = spec_export("verify", out, "--target", other)
    assert ran.code == 1 and "target-differs" in ran.codes("error")
    allowed = spec_export("verify", out, "--target", other, "--allow", "target-differs")
    assert allowed.code == 0, allowed.data


def test_a_mistral_path_is_a_warning(draft: Path, tmp_path: Path) -> None:
    out = tmp_path / "eagle-mistral"
    ran = spec_export("finalize", draft, "--output", out, "--no-compare")
    assert ran.code == 0 and "path-mistral" in ran.codes("warning")
    plain = spec_export("finalize", draft, "--output", tmp_path / "o", "--no-compare")
    assert "path-mistral" not in plain.codes()


def test_a_short_context_is_a_warning(tmp_path: Path) -> None:
    target = field.make_target(tmp_path / "T0", max_position_embeddings=128)
    draft = field.make_draft(tmp_path / "E0", target)
    ran = spec_export("finalize", draft, "--output", tmp_path / "o", "--no-compare")
    found = ran.finding("context-too-short")
    assert found["severity"] == "warning"
    assert "64" in found["message"] and "128" in found["message"]


def test_without_comparison_no_torch_is_imported(draft: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from spec_export import cli;"
        f"c = cli.run(['finalize', {str(draft)!r}, '--output', "
        f"{str(tmp_path / 'out')!r}, '--no-compare']);"
        "print(c, 'torch' in sys.modules, file=sys.stderr)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert ran.stderr.strip().splitlines()[-1] == "0 False"


def test_a_changed_weight_of_an_export_is_not_finished(
    draft: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert spec_export("finalize", draft, "--output", out, "--no-compare").code == 0
    file = out / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    ran = spec_export("finalize", out)
    assert ran.code == 1 and "file-changed" in ran.codes("error")


def test_an_allowed_deviation_explains_a_failed_comparison(
    target: Path, tmp_path: Path
) -> None:
    draft = field.make_draft(tmp_path / "E0", target, norm_before_residual=True)
    argv = ("finalize", draft, "--plugin", "never", "--output", tmp_path / "out")
    refused = spec_export(*argv)
    assert refused.code == 1 and "norm-before-residual" in refused.codes("error")
    assert not (tmp_path / "out").exists()
    ran = spec_export(*argv, "--allow", "norm-before-residual")
    assert ran.code == 0, ran.data
    manifest = read_manifest(str(tmp_path / "out"))
    assert manifest.comparison["layout"].verdict == "fail"
    assert next(d.code for d in manifest.deviations) == "norm-before-residual"


def test_force_never_replaces_what_is_read(
    draft: Path, target: Path, tmp_path: Path
) -> None:
    before = (draft / "model.safetensors").read_bytes()
    for place in (draft, target):
        ran = spec_export("finalize", draft, "--output", place, "--force")
        assert (ran.code, ran.codes("error")) == (2, ["output-exists"])
    assert (draft / "model.safetensors").read_bytes() == before
    assert (target / "model.safetensors").exists()


def test_options_hold_when_an_export_is_finished(draft: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert spec_export("finalize", draft, "--output", out).code == 0
    old = spec_export("finalize", out, "--sglang", "0.5.2")
    assert old.code == 1 and "release-too-old" in old.codes("error")
    assert spec_export("finalize", out, "--sglang", "abc").code == 2
    assert spec_export("finalize", out, "--dtype", "float32").code == 2
    other = field.make_target(tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    save_file({k: v + 1 for k, v in weights.items()}, other / "model.safetensors")
    wrong = spec_export("finalize", out, "--target", other)
    assert wrong.code == 1 and "target-differs" in wrong.codes("error")
    assert read_manifest(str(out)).comparison["layout"].verdict == "pass"


def test_a_recorded_verdict_outlives_a_finalize_without_comparison(
    draft: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert spec_export("finalize", draft, "--output", out).code == 0
    ran = spec_export("finalize", out, "--no-compare")
    assert (ran.code, ran.data["verdict"]) == (0, "pass")
