"""The pipeline: what an export holds, what its manifest says, what never appears."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from spec_export import read_manifest
from spec_export.artifact.source import CheckpointSource, TrainingRecord
from spec_export.artifact.target import open_target
from spec_export.export import ExportOptions, export_source, plan_source
from spec_export.findings import SpecExportError
from tests.helpers import field
from tests.helpers.cli import spec_export


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return field.make_target(tmp_path / "T0")


@pytest.fixture
def draft(tmp_path: Path, target: Path) -> Path:
    return field.make_draft(tmp_path / "E0", target)


def export(draft: Path, target: Path, out: Path, **options: object) -> Path:
    source = CheckpointSource.open(draft)
    made = export_source(
        source,
        open_target(target),
        ExportOptions(**options),
        out,  # type: ignore[arg-type]
    )
    return made.folder


def test_the_folder_holds_what_sglang_loads_and_nothing_else(
    draft: Path, target: Path, tmp_path: Path
) -> None:
    (draft / "optimizer_state_dict.pt").write_bytes(b"x")
    folder = export(draft, target, tmp_path / "out")
    assert sorted(p.name for p in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "spec_export_manifest.json",
    ]
    names = set(load_file(folder / "model.safetensors"))
    assert "midlayer.self_attn.q_proj.weight" in names
    assert not [n for n in names if n.startswith(("layers.", "embed", "t2d", "model."))]


def test_values_are_the_sources_bit_for_bit(
    draft: Path, target: Path, tmp_path: Path
) -> None:
    folder = export(draft, target, tmp_path / "out")
    written = load_file(folder / "model.safetensors")
    held = load_file(draft / "model.safetensors")
    manifest = read_manifest(str(folder))
    assert set(manifest.tensors) == set(written)
    for name, entry in manifest.tensors.items():
        assert torch.equal(written[name], held[entry.source[0]])
        raw = written[name].contiguous().view(torch.uint8).numpy().tobytes()
        assert entry.sha256 == hashlib.sha256(raw).hexdigest()


def test_roles_are_decided_by_value(draft: Path, target: Path, tmp_path: Path) -> None:
    folder = export(draft, target, tmp_path / "out")
    tensors = read_manifest(str(folder)).tensors
    assert tensors["lm_head.weight"].role == "frozen"
    assert tensors["lm_head.weight"].equals_target is True
    assert tensors["d2t"].role == "buffer"
    # a bare checkpoint has no first step, and fc has no counterpart in the target
    assert tensors["fc.weight"].role is None
    provided = read_manifest(str(folder)).provided_by_target[0]
    assert (provided.name, provided.role) == ("embed_tokens.weight", "frozen")


def test_a_trained_head_is_trained_whatever_anyone_declares(
    target: Path, tmp_path: Path
) -> None:
    tensors = field.draft_tensors(target)
    tensors["lm_head.weight"][3] += 1
    draft = field.write_draft(tmp_path / "E", field.draft_config(target), tensors)
    folder = export(draft, target, tmp_path / "out")
    head = read_manifest(str(folder)).tensors["lm_head.weight"]
    assert (head.role, head.equals_target) == ("trained", False)


def test_a_trained_embedding_is_an_error_and_names_it(
    target: Path, tmp_path: Path
) -> None:
    tensors = field.draft_tensors(target)
    tensors["embed_tokens.weight"][7] += 1
    draft = field.write_draft(tmp_path / "E", field.draft_config(target), tensors)
    with pytest.raises(SpecExportError) as caught:
        export(draft, target, tmp_path / "out")
    errors = [f for f in caught.value.findings if f.severity == "error"]
    assert [(f.code, f.subject) for f in errors] == [
        ("trained-embedding", "embed_tokens.weight")
    ]
    assert not (tmp_path / "out").exists()
    allowed = export(draft, target, tmp_path / "out", allow=("trained-embedding",))
    manifest = read_manifest(str(allowed))
    assert manifest.deviations[0].code == "trained-embedding"


def test_another_target_is_told_from_a_trained_embedding(
    draft: Path, tmp_path: Path
) -> None:
    other = field.make_target(tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    from safetensors.torch import save_file

    save_file({k: v + 1 for k, v in weights.items()}, other / "model.safetensors")
    with pytest.raises(SpecExportError) as caught:
        export(draft, other, tmp_path / "out")
    codes = {f.code for f in caught.value.findings if f.severity == "error"}
    assert codes == {"target-differs"}
    folder = export(draft, other, tmp_path / "out", allow=("target-differs",))
    assert read_manifest(str(folder)).deviations[0].code == "target-differs"


def test_what_moved_since_the_first_step_is_trained(
    draft: Path, target: Path, tmp_path: Path
) -> None:
    source = CheckpointSource.open(draft)
    moved = {name: name == "fc.weight" for name in source.tensors}
    source.record = TrainingRecord(
        run_id="r",
        global_step=5,
        changed=moved,
        requires_grad=dict.fromkeys(source.tensors, True),
        in_optimizer={name: name == "norm.weight" for name in source.tensors},
    )
    made = export_source(source, open_target(target), ExportOptions(), tmp_path / "out")
    tensors = made.manifest.tensors
    assert tensors["fc.weight"].role == "trained"
    assert tensors["norm.weight"].role == "frozen"
    assert tensors["norm.weight"].in_optimizer is True
    doubted = [f.subject for f in made.findings if f.code == "optimizer-no-change"]
    assert doubted == ["norm.weight"]


def test_nothing_moved_is_worth_a_warning(
    draft: Path, target: Path, tmp_path: Path
) -> None:
    source = CheckpointSource.open(draft)
    source.record = TrainingRecord(
        global_step=5, changed=dict.fromkeys(source.tensors, False)
    )
    made = export_source(source, open_target(target), ExportOptions(), tmp_path / "out")
    assert "nothing-trained" in {f.code for f in made.findings}


def test_shards_hold_what_one_file_holds(
    draft: Path, target: Path, tmp_path: Path
) -> None:
    one = load_file(export(draft, target, tmp_path / "one") / "model.safetensors")
    folder = export(draft, target, tmp_path / "many", max_shard_size=600)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    many: dict[str, torch.Tensor] = {}
    for file in set(index["weight_map"].values()):
        many |= load_file(folder / file)
        with safe_open(folder / file, "pt") as opened:
            metadata = opened.metadata()
        assert json.loads(metadata["spec_export.manifest"])["tensors"]
        assert metadata["format"] == "pt"
    assert set(one) == set(many)
    assert all(torch.equal(one[k], many[k]) for k in one)


def test_mixed_dtypes_become_bfloat16_and_integers_stay(
    target: Path, tmp_path: Path
) -> None:
    tensors = field.draft_tensors(target)
    tensors["norm.weight"] = tensors["norm.weight"].float()
    tensors["d2t"] = tensors["d2t"].to(torch.int32)
    draft = field.write_draft(tmp_path / "E", field.draft_config(target), tensors)
    folder = export(draft, target, tmp_path / "out")
    written = load_file(folder / "model.safetensors")
    assert written["norm.weight"].dtype == torch.bfloat16
    assert written["d2t"].dtype == torch.int64
    assert written["d2t"].tolist() == tensors["d2t"].tolist()
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"


def test_modes_are_those_of_the_umask(
    draft: Path, target: Path, tmp_path: Path
) -> None:
    before = os.umask(0o022)
    try:
        folder = export(draft, target, tmp_path / "out")
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(p.stat().st_mode) for p in folder.iterdir()}
    assert modes == {0o644}


def test_a_taken_place_is_refused_before_any_work(
    draft: Path, target: Path, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "note.txt").write_text("mine")
    with pytest.raises(SpecExportError) as caught:
        export(draft, target, tmp_path / "out")
    assert caught.value.exit_code == 2
    assert (tmp_path / "out" / "note.txt").read_text() == "mine"


def test_a_failed_step_is_published_as_failed(
    draft: Path, target: Path, tmp_path: Path
) -> None:
    from spec_export.judge.verdict import Leg

    source = CheckpointSource.open(draft)
    made = export_source(
        source,
        open_target(target),
        ExportOptions(),
        tmp_path / "runs" / "step-00000005",
        judge=lambda folder: {"layout": Leg("layout", "fail", "wrong on purpose")},
        place="step",
    )
    assert made.status == "failed"
    assert made.folder.name == "step-00000005.failed"
    assert read_manifest(str(made.folder)).status == "failed"
    refused = spec_export("verify", made.folder)
    assert refused.code == 1 and "export-failed-status" in refused.codes("error")


def test_nothing_private_travels(target: Path, tmp_path: Path) -> None:
    draft = field.make_draft(tmp_path / "E0", target)
    (draft.parent / "run.yaml").write_text(
        "train:\n  logging: {logger: wandb, run_name: secret-run}\n"
        f"  data: {{data_path: {tmp_path}/data}}\n"
    )
    folder = export(draft, target, tmp_path / "out")
    text = "".join(
        (folder / name).read_text()
        for name in ("spec_export_manifest.json", "config.json")
    )
    assert str(tmp_path) not in text
    assert "secret-run" not in text


def test_planning_reads_no_weights(
    draft: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = CheckpointSource.open(draft)

    def forbidden(name: str) -> None:
        raise AssertionError(name)

    monkeypatch.setattr(source, "read", forbidden)
    plan = plan_source(source, open_target(target), ExportOptions())
    assert plan.ok and plan.placements
