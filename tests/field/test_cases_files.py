"""The cases from the field about files and their formats: 19 and 21."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.field.desk import (
    Answer,
    Desk,
)
from tests.field.test_cases import HEAD, NO, slim
from tests.helpers.field import (
    VOCAB,
    H,
    draft_tensors,
    make_target,
)


# ---------------------------------------------- 19: dtypes, leftover quantisation
def test_case_19_mixed_floats_become_bfloat16(desk: Desk) -> None:
    mixed = {
        k: v.float() if "norm" in k else v
        for k, v in draft_tensors(desk.target).items()
    }
    mixed["norm.weight"] = mixed["norm.weight"] + 2**-9  # not a bfloat16 number
    source = desk.draft(mixed, dtype="float16")
    answer = desk.ok("19 (a)", desk.finalize(source))
    assert answer.config["dtype"] == answer.config["torch_dtype"] == "bfloat16"
    for name, value in answer.tensors.items():
        assert value.dtype == (torch.int64 if name == "d2t" else torch.bfloat16), name
    casts = [f for f in answer.manifest["findings"] if f["code"] == "dtype-cast"]
    (cast,) = casts
    wide = [k for k in mixed if "norm" in k]
    assert f"{len(wide)} tensors" in cast["message"]
    error = (mixed["norm.weight"] - mixed["norm.weight"].bfloat16().float()).abs().max()
    assert "F32" in cast["message"] and "BF16" in cast["message"]
    assert f"{error.item():.3g}, in norm.weight" in cast["message"] and error > 0


def test_case_19_a_leftover_quantization_config(desk: Desk) -> None:
    source = desk.draft(quantization_config={"quant_method": "awq", "bits": 4})
    answer = desk.warned("19 (b)", desk.finalize(source), "quantization_config")
    assert "quantization_config" not in answer.config
    launch = answer.manifest["serving"]["launch"]
    at = launch.index("--speculative-draft-model-quantization")
    assert launch[at + 1] == "unquant"


def test_case_19_a_packed_head_cannot_be_copied(desk: Desk) -> None:
    target = make_target(desk.root / "T1")
    held = load_file(target / "model.safetensors")
    held["lm_head.weight"] = torch.ones(VOCAB, H // 2, dtype=torch.uint8)
    save_file(held, target / "model.safetensors", {"format": "pt"})
    source = slim(desk, desk.target)
    answer = desk.finalize(source, NO, "--target", target)
    desk.fails("19 (c)", answer, HEAD, "packed")


# ------------------------------------------------- 21: files, shards, double names
def shards(folder: Path, parts: list[dict[str, torch.Tensor]]) -> dict[str, str]:
    """Replace the one weight file by several and an index; returns its map."""
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for i, part in enumerate(parts):
        name = f"model-{i + 1:05}-of-{len(parts):05}.safetensors"
        save_file(part, folder / name, {"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def sharded(desk: Desk) -> tuple[Path, dict[str, str]]:
    source = desk.draft()
    tensors = load_file(source / "model.safetensors")
    names = sorted(tensors)
    parts = [{n: tensors[n] for n in names[i::3]} for i in range(3)]
    return source, shards(source, parts)


def test_case_21_shards_that_are_whole(desk: Desk) -> None:
    source, _ = sharded(desk)
    desk.ok("21 three shards", desk.finalize(source))


def test_case_21_shards_that_are_not(desk: Desk) -> None:
    source, weight_map = sharded(desk)
    third = "model-00003-of-00003.safetensors"
    (source / third).rename(source / "away")
    desk.fails("21 (a)", desk.finalize(source, NO), third, "not there")
    (source / "away").rename(source / third)
    other = next(f for f in set(weight_map.values()) if f != weight_map["fc.weight"])
    write_index(source, weight_map | {"fc.weight": other})
    desk.fails("21 (b)", desk.finalize(source, NO), "fc.weight", other, "lacks it")
    write_index(source, weight_map)
    held = load_file(source / other)
    save_file(held | {"fc.weight": torch.ones(H, 24)}, source / other)
    answer = desk.finalize(source, NO)
    desk.fails("21 (c)", answer, "fc.weight", other, weight_map["fc.weight"])


def test_case_21_a_wrapper_name_beside_the_clean_one(desk: Desk) -> None:
    clean = "layers.0.mlp.down_proj.weight"
    wrapped = "layers.0._orig_mod.mlp.down_proj.weight"
    other = draft_tensors()[clean] * 2
    answer = desk.finalize(desk.draft(add={wrapped: other}), NO)
    desk.fails("21 (d)", answer, clean, wrapped, "different values")


def test_case_21_an_output_folder_that_is_not_empty(desk: Desk) -> None:
    source, output = desk.draft(), desk.new("export")
    output.mkdir()
    stray = output / "model-00001-of-00002.safetensors"
    save_file({"fc.weight": torch.ones(2)}, stray)
    answer = desk.run("finalize", source, "--output", output, NO)
    desk.fails("21 (e)", answer, output.name, "exists", code=2)
    assert [p.name for p in output.iterdir()] == [stray.name]
    answer = desk.finalize(source, NO, "--force", output=output)
    desk.ok("21 (e) forced", answer)
    assert not stray.exists()
    desk.ok("21 (e) verified", desk.verify(output))


def test_case_21_files_beside_the_weights(desk: Desk) -> None:
    target_head = load_file(desk.target / "model.safetensors")["lm_head.weight"]
    source = desk.draft(
        add={HEAD: target_head}, drop=("d2t", "t2d"), draft_vocab_size=VOCAB
    )
    np.save(source / "d2t.npy", draft_tensors()["d2t"].numpy())
    np.save(source / "t2d.npy", draft_tensors()["t2d"].numpy())
    answer = desk.ok("21 (f)", desk.finalize(source))
    assert "d2t" not in answer.tensors
    assert answer.config["draft_vocab_size"] == VOCAB
    assert answer.manifest["vocab"]["encoding"] is None
    source = desk.draft()
    torch.save({"state": {}}, source / "optimizer_state_dict.pt")
    answer = desk.ok("21 (g)", desk.finalize(source, NO))
    assert answer.output is not None
    assert not list(answer.output.glob("*.pt"))
    assert "optimizer_state_dict.pt" in {f["subject"] for f in answer.of("info")}


def test_case_21_a_weight_file_that_nobody_lists(desk: Desk) -> None:
    export = desk.finalize(desk.draft(), NO).output
    assert export is not None
    save_file({"fc.weight": torch.ones(H, 24)}, export / "extra.safetensors")
    desk.fails("21 verify", desk.verify(export), "extra.safetensors", "list")


KILLED = """
import os, signal, sys
from spec_export.artifact import writer
from spec_export import cli, export
real = export.write_weights
def write(*args, **kwargs):
    found = real(*args, **kwargs)
    os.kill(os.getpid(), signal.SIGKILL)
    return found
export.write_weights = write
sys.exit(cli.run(sys.argv[1:]))
"""


def test_case_21_a_crash_while_writing_leaves_nothing_that_verifies(
    desk: Desk,
) -> None:
    source, output = desk.draft(), desk.new("export")
    argv = ["finalize", str(source), "--output", str(output), NO]
    done = subprocess.run([sys.executable, "-c", KILLED, *argv], timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert not output.exists()
    leftovers = list(output.parent.glob(".staging-*"))
    assert len(leftovers) == 1 and list(leftovers[0].glob("*.safetensors"))
    answer = desk.verify(leftovers[0])
    desk.fails("21 crash", answer, "config.json", "not there", code=2)
    again = desk.finalize(source, NO, output=output)
    desk.ok("21 after the crash", again)
    assert not list(output.parent.glob(".staging-*"))


# ------------------------------------------------------------ in a process of its own
def test_the_answers_are_those_of_the_real_command(desk: Desk) -> None:
    """Exit code and object on stdout do not depend on running in this process."""

    def command(*argv: Any) -> Answer:
        done = subprocess.run(
            [sys.executable, "-m", "spec_export.cli", *map(str, argv), "--json"],
            capture_output=True,
            timeout=60,
        )
        return Answer(done.returncode, json.loads(done.stdout))

    good, bad = desk.draft(), desk.draft(add={"fc.weight": torch.zeros(H, 24)})
    output = desk.new("export")
    desk.ok("process: 2", command("finalize", good, "--output", output, NO))
    desk.ok("process: verify", command("verify", output, "--target", desk.target))
    answer = command("finalize", bad, "--output", desk.new("export"), NO)
    desk.fails("process: 8 (c)", answer, "fc.weight", "[8, 24]")
    answer = command("finalize", good, "--output", output, NO)
    desk.fails("process: 21 (e)", answer, output.name, "exists", code=2)
