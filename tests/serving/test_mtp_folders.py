"""SGLang's MTP classes do with a folder what ``verify`` says of it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from spec_export.serving.verify import verify
from tests.serving.sglang_process import IMPORTED, run_script
from tests.serving.test_mtp import _export
from tests.unit.test_verify_mtp import YARN, Change, Config, Tensors, by_hand, fuse


def _rename(tensors: Tensors, config: Config) -> None:
    tensors["mtp.final_norm.weight"] = tensors.pop("mtp.norm.weight")


def _run(*folders: Path) -> subprocess.CompletedProcess[str]:
    """SGLang's loader fills its class, whose forward is compared with the judge's."""
    return run_script("mtp_check.py", *folders, environment=IMPORTED)


@pytest.mark.parametrize("change", [_rename, fuse], ids=["renamed", "fused"])
def test_qwen3_next_raises(target: Path, tmp_path: Path, change: Change) -> None:
    verifier, _ = _export(tmp_path, "qwen3_next")
    draft = by_hand(tmp_path, tmp_path / "draft", change)
    said = [f.message for f in verify(draft).findings if f.code == "name-dropped"]
    assert said and all("KeyError" in message for message in said)
    ran = _run(target, verifier, draft)
    assert ran.returncode != 0 and "KeyError: 'model." in ran.stderr


def test_qwen3_5_takes_experts_in_one_tensor(target: Path, tmp_path: Path) -> None:
    verifier, _ = _export(tmp_path, "qwen3_5_moe_text")
    draft = by_hand(tmp_path, tmp_path / "draft", fuse)
    assert not [f for f in verify(draft).findings if f.severity == "error"]
    ran = _run(target, verifier, draft)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert json.loads(ran.stdout)["difference"] <= 1e-5


def test_qwen3_5_drops_what_it_does_not_know(target: Path, tmp_path: Path) -> None:
    verifier, _ = _export(tmp_path, "qwen3_5_text")
    draft = by_hand(tmp_path, tmp_path / "draft", _rename)
    said = {f.subject for f in verify(draft).findings if f.severity == "error"}
    assert said == {"mtp.final_norm.weight", "mtp.norm.weight"}
    ran = _run(target, verifier, draft)
    assert ran.returncode == 0, ran.stderr[-3000:]
    # The norm stays at what it starts with, in the class as in the judge's reference.
    assert json.loads(ran.stdout)["difference"] <= 1e-5


def test_qwen3_next_reads_the_older_spelling_of_rope(
    target: Path, tmp_path: Path
) -> None:
    verifier, _ = _export(tmp_path, "qwen3_next")

    def older(tensors: Tensors, config: Config) -> None:
        del config["rope_parameters"]
        config |= {"rope_theta": YARN["rope_theta"], "rope_scaling": YARN}

    def both(tensors: Tensors, config: Config) -> None:
        older(tensors, config)
        config["rope_parameters"] = YARN

    draft = by_hand(tmp_path, tmp_path / "both", both)
    said = {f.subject for f in verify(draft).findings if f.severity == "error"}
    assert said == {"rope_parameters.rope_type"}
    ran = _run(target, verifier, draft)
    assert ran.returncode != 0 and "attribute 'max_position_embeddings'" in ran.stderr
    draft = by_hand(tmp_path, tmp_path / "older", older)
    assert not [f for f in verify(draft).findings if f.severity == "error"]
    ran = _run(target, verifier, draft)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert json.loads(ran.stdout)["difference"] <= 1e-5
