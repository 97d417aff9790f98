"""The cases from the field that EAGLE-3 can meet, numbered as they were reported.

T0 and E0 are those of ``tests/helpers/field.py``. Server profiles: ``OLD`` is
SGLang 0.5.9, ``NEW`` 0.5.23.
"""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from spec_export.artifact.target import open_target
from spec_export.comparison import leg_of_probe
from tests.field.desk import (
    NEW,
    OLD,
    Answer,
    Desk,
    copy_export,
    names_of,
    rename_tensors,
    same_bits,
)
from tests.helpers.field import (
    DRAFT,
    VOCAB,
    H,
    draft_ids,
    draft_tensors,
    make_target,
)

IDS = "eagle_aux_hidden_state_layer_ids"
EMBED, HEAD = "embed_tokens.weight", "lm_head.weight"
NO = "--no-compare"
NEVER = ("--plugin", "never")
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 5e5,
}


# ------------------------------------------------------- 2: names per server version
def test_case_2_one_layer_is_written_in_the_spelling_that_serves_everywhere(
    desk: Desk,
) -> None:
    source = desk.draft()
    old = desk.finalize(source, "--sglang", OLD)
    desk.warned("2 old", old, IDS, "0.5.11")
    new = desk.ok("2 new", desk.finalize(source, "--sglang", NEW))
    assert "--disable-cuda-graph" in old.manifest["serving"]["launch"]
    assert "--disable-cuda-graph" not in new.manifest["serving"]["launch"]
    for answer in (old, new):
        assert not [
            name
            for name in answer.tensors
            if name.startswith(("layers.", "model.", "draft_model."))
        ]
        assert any(name.startswith("midlayer.") for name in answer.tensors)
        assert answer.config["eagle_config"][IDS] == [0, 2, 3]
    assert old.output and new.output
    desk.ok("2 old, verified for new", desk.verify(old.output, "--sglang", NEW))
    # Its launch line lacks the flag that these layer ids need before 0.5.11.
    back = desk.verify(new.output, "--sglang", OLD)
    desk.warned("2 new, verified for old", back, IDS, "0.5.11")
    assert "--disable-cuda-graph" in back.of("warning")[0]["hint"]


def test_case_2_a_hand_made_folder_with_the_newer_names(desk: Desk) -> None:
    export = desk.finalize(desk.draft(), NO).output
    assert export is not None
    folder = rename_tensors(
        copy_export(export, desk.new("hand")), {"midlayer.": "layers.0."}
    )
    old = desk.verify(folder, "--sglang", OLD)
    lost = [n for n in names_of(folder) if n.startswith("layers.0.")]
    assert len(lost) == 10
    for name in lost:
        desk.fails("2 hand-made layers.0, old", old, name, OLD, "0.5.12")
    del desk.rows[1:]
    desk.ok("2 hand-made layers.0, new", desk.verify(folder, "--sglang", NEW))


# --------------------------------------------------- 4: no head in the checkpoint
def slim(desk: Desk, target: Path) -> Path:
    """E0 with the whole vocabulary, without the tensors that the target owns."""
    return desk.draft(
        draft_tensors(target),
        target=target,
        drop=(HEAD, EMBED, "d2t", "t2d"),
        draft_vocab_size=VOCAB,
    )


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_case_4_the_head_comes_from_the_target(desk: Desk, tied: bool) -> None:
    target = make_target(desk.root / "T1", tied=tied)
    answer = desk.finalize(slim(desk, target))
    desk.ok(f"4 ({'b' if tied else 'a'})", answer)
    assert answer.config["draft_vocab_size"] == VOCAB
    held = load_file(target / "model.safetensors")
    wanted = held["model.embed_tokens.weight" if tied else "lm_head.weight"]
    assert same_bits(answer.tensors[HEAD], wanted)
    assert answer.manifest["target_model"]["head"] == ("tied" if tied else "own")
    assert answer.manifest["tensors"][HEAD]["source"] == ["target:head"]
    assert answer.manifest["tensors"][HEAD]["role"] == "frozen"


def test_case_4_without_the_target_nothing_is_made_up(desk: Desk) -> None:
    source = slim(desk, desk.target)
    desk.target.rename(desk.root / "gone")
    answer = desk.finalize(source, NO)
    desk.fails("4 (c)", answer, "speculators_config.verifier.name_or_path", "not")
    bare = make_target(desk.root / "T1", weights=False)
    answer = desk.finalize(source, NO, "--target", bare)
    desk.fails("4 (c) config only", answer, HEAD, "weights are not at hand")


# --------------------------------------------------------- 5: inherited tying flag
def test_case_5_an_inherited_tying_flag_is_not_exported(desk: Desk) -> None:
    target = make_target(desk.root / "T1", tied=True)
    source = desk.draft(target=target, tie_word_embeddings=True)
    answer = desk.ok("5 export", desk.finalize(source))
    assert answer.config["tie_word_embeddings"] is False
    before = load_file(source / "model.safetensors")[HEAD]
    assert same_bits(answer.tensors[HEAD], before)
    assert answer.output is not None
    hand = copy_export(answer.output, desk.new("hand"), tie_word_embeddings=True)
    verified = desk.verify(hand, "--target", target)
    desk.fails("5 verify", verified, "tie_word_embeddings", str(VOCAB), str(DRAFT))


# -------------------------------------------------------- 7: the map of token ids
def broken_maps() -> dict[str, tuple[dict[str, torch.Tensor], str, tuple[str, ...]]]:
    """Sub-case -> changed tensors, subject, words of the message."""
    valid = draft_tensors()
    ids = draft_ids()

    def offsets(at: int, means: int) -> torch.Tensor:
        changed = ids.clone()
        changed[at] = means
        return changed - torch.arange(DRAFT)

    stray = valid["t2d"].clone()
    stray[30] = True
    return {
        "a": ({"d2t": offsets(3, 40)}, "d2t", ("40", "32")),
        "b": ({"d2t": offsets(3, 7)}, "d2t", ("draft ids 3 and 4", "7")),
        "c": ({"t2d": stray}, "t2d", ("30", "does not reach")),
        "d": ({"d2t": valid["d2t"].float()}, "d2t", ("F32", "I64")),
        "e": ({"d2t": valid["d2t"][:9].clone()}, "d2t", ("[9]", "[12]")),
        "g": (
            {
                "d2t": torch.zeros(DRAFT, dtype=torch.int64),
                "t2d": torch.zeros(VOCAB, dtype=torch.bool),
            },
            "t2d",
            ("false", "0 ids are true"),
        ),
    }


def test_case_7_a_valid_map_is_written_as_it_is(desk: Desk) -> None:
    answer = desk.ok("7 valid", desk.finalize(desk.draft()))
    assert same_bits(answer.tensors["d2t"], draft_tensors()["d2t"])
    assert answer.tensors["d2t"].dtype == torch.int64
    assert "t2d" not in answer.tensors
    assert {"name": "t2d"}.items() <= answer.manifest["dropped"][0].items()


@pytest.mark.parametrize("letter", "abcdeg")
def test_case_7_broken_maps(desk: Desk, letter: str) -> None:
    changed, subject, says = broken_maps()[letter]
    answer = desk.finalize(desk.draft(add=changed), NO)
    desk.fails(f"7 ({letter})", answer, subject, *says)


def identity_draft(desk: Desk) -> Path:
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[:DRAFT] = True
    head = load_file(desk.target / "model.safetensors")["lm_head.weight"]
    zeros = torch.zeros(DRAFT, dtype=torch.int64)
    return desk.draft(add={"d2t": zeros, "t2d": mask, HEAD: head[:DRAFT].clone()})


def test_case_7_an_identity_map_has_to_be_meant(desk: Desk) -> None:
    source = identity_draft(desk)
    answer = desk.finalize(source, NO)
    desk.fails("7 (f)", answer, "d2t", "all 12 offsets are zero")
    meant = desk.finalize(source, "--allow", "vocab-map-identity")
    desk.warned("7 (f) allowed", meant, "d2t", "all 12 offsets are zero")
    assert [d["code"] for d in meant.manifest["deviations"]] == ["vocab-map-identity"]


# ------------------------------------------------ 8: values that were never loaded
def test_case_8_impossible_values(desk: Desk) -> None:
    base = draft_tensors(desk.target)
    embed = base[EMBED].clone()
    embed[7, 2] = math.nan
    down = "layers.0.mlp.down_proj.weight"
    cases = {
        "a": (HEAD, torch.full((DRAFT, H), math.nan, dtype=torch.bfloat16), "NaN"),
        "b": (EMBED, embed, "row 7"),
        "c": ("fc.weight", torch.zeros_like(base["fc.weight"]), "zero"),
        "d": (down, base[down].reshape(-1), "[128]"),
    }
    for letter, (name, value, says) in cases.items():
        answer = desk.finalize(desk.draft(add={name: value}), NO)
        desk.fails(f"8 ({letter})", answer, name, says)


# ---------------------------------------------------------- 10: auxiliary layer ids


def wide_fc(desk: Desk, columns: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    return {"fc.weight": torch.randn(H, columns).to(torch.bfloat16)}


def test_case_10_ids_that_nothing_records(desk: Desk) -> None:
    answer = desk.finalize(desk.draft(**{IDS: None}), NO)
    desk.fails("10 (a)", answer, IDS, "not recorded")


def test_case_10_four_layers_need_a_release_that_counts_them(desk: Desk) -> None:
    source = desk.draft(add=wide_fc(desk, 32), **{IDS: [1, 2, 3, 4]})
    answer = desk.ok("10 (b) new", desk.finalize(source, "--sglang", NEW))
    assert answer.config["num_aux_hidden_states"] == 4
    assert answer.config["eagle_config"][IDS] == [0, 1, 2, 3]
    old = desk.finalize(source, NO, "--sglang", OLD)
    desk.fails("10 (b) old", old, IDS, "4 auxiliary layers", "0.5.12", OLD)


def test_case_10_the_embedding_output(desk: Desk) -> None:
    source = desk.draft(**{IDS: [0, 3, 5]})
    answer = desk.ok("10 (e) 0.5.22", desk.finalize(source, "--sglang", "0.5.22"))
    assert answer.config["eagle_config"][IDS] == [-1, 2, 4]
    old = desk.finalize(source, NO, "--sglang", "0.5.21")
    desk.fails("10 (e) 0.5.21", old, IDS, "id 0", "0.5.22", "0.5.21")


def test_case_10_columns_that_do_not_fit_the_ids(desk: Desk) -> None:
    answer = desk.finalize(desk.draft(add=wide_fc(desk, 32)), NO)
    desk.fails("10 (f)", answer, "fc.weight", "[8, 32]", "[8, 24]")


# ------------------------------------------------------------------------ 12: RoPE
def rotary(config: dict[str, Any]) -> tuple[np.ndarray, float]:
    """Inverse frequencies and scale, as transformers computes them."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = LlamaRotaryEmbedding(LlamaConfig(**config))
    return rope.inv_freq.numpy(), rope.attention_scaling


def test_case_12_yarn_is_the_same_in_both_spellings(desk: Desk) -> None:
    source = desk.draft(layer={"rope_parameters": YARN})
    answer = desk.ok("12 (a)", desk.finalize(source))
    keys = ("rope_theta", "rope_scaling", "rope_parameters")
    config = answer.config
    assert all(key in config for key in keys)
    newer = rotary({k: v for k, v in config.items() if k not in keys[:2]})
    older = rotary({k: v for k, v in config.items() if k != keys[2]})
    trained = rotary(
        json.loads((source / "config.json").read_text())["transformer_layer_config"]
    )
    for found in (newer, older):
        assert np.array_equal(found[0], trained[0])
        assert found[1] == trained[1]
    # Logits, position 40 among them, of a server that reads one spelling only.
    assert answer.output is not None
    target = open_target(desk.target)
    for release, cut in (("0.5.9", keys[2:]), (NEW, keys[:2])):
        path = answer.output / "config.json"
        whole = path.read_text()
        path.write_text(json.dumps({k: v for k, v in config.items() if k not in cut}))
        leg = leg_of_probe(answer.output, target, "cpu", release)
        path.write_text(whole)
        assert leg.verdict == "pass", (release, leg.reason)
        assert leg.positions is not None and leg.positions > 40
    # The negative control: without both, the judge sees it.
    path.write_text(json.dumps({k: v for k, v in config.items() if k not in keys}))
    assert leg_of_probe(answer.output, target, "cpu", NEW).verdict == "fail"


def test_case_12_default_rope_in_the_newer_form_only(desk: Desk) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e6}
    answer = desk.finalize(desk.draft(layer={"rope_parameters": rope}))
    desk.ok("12 (b)", answer)
    assert answer.config["rope_theta"] == 1e6
    assert answer.config.get("rope_scaling") is None
    assert answer.config["rope_parameters"] == rope


def test_case_12_sections_of_a_multimodal_target_are_left_out(desk: Desk) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    answer = desk.finalize(desk.draft(layer={"rope_parameters": rope}))
    desk.ok("12 (c)", answer)
    assert "mrope" not in json.dumps(answer.config)


# -------------------------------------------------------- 13: norm_before_residual
def recorded(desk: Desk, value: bool | None) -> Path:
    """E0 whose configuration forgot the flag, in a run that recorded ``value``."""
    source = desk.draft(norm_before_residual=...)
    if value is not None:
        recipe = {"train": {"draft": {"norm_before_residual": value}}}
        (source / "run.yaml").write_text(yaml.safe_dump(recipe))
    return source


def test_case_13_the_stock_class_has_no_such_switch(desk: Desk) -> None:
    flag = "norm_before_residual"
    true = desk.draft(norm_before_residual=True)
    desk.fails("13 true, stock", desk.finalize(true, NO, *NEVER), flag, "true")
    plain = desk.finalize(desk.draft(norm_before_residual=False), *NEVER)
    desk.ok("13 false, stock", plain)
    desk.ok("13 recorded false", desk.finalize(recorded(desk, False), *NEVER))
    answer = desk.finalize(recorded(desk, True), NO, *NEVER)
    desk.fails("13 recorded true, stock", answer, flag, "true")
    answer = desk.finalize(recorded(desk, None), NO, *NEVER)
    desk.fails("13 unknown", answer, flag, "missing")
    answer = desk.finalize(recorded(desk, None), NO)
    desk.fails("13 unknown, plug-in", answer, flag, "missing")


def test_case_13_the_plug_in_has_it(desk: Desk) -> None:
    answer = desk.finalize(desk.draft(norm_before_residual=True))
    desk.ok("13 true, plug-in", answer)
    assert answer.data["requires_plugin"] is True
    assert answer.config["architectures"] == ["SpecExportEagle3ForCausalLM"]
    assert answer.config["norm_before_residual"] is True


# ----------------------------------------------------------- 17: flags and tensors
def norm(width: int) -> torch.Tensor:
    return torch.linspace(0.5, 2.0, width).to(torch.bfloat16)


def test_case_17_flags_and_tensors_have_to_agree(desk: Desk) -> None:
    flag = "norm_before_fc"
    answer = desk.finalize(desk.draft(add={"input_norm.weight": norm(24)}), NO)
    desk.fails("17 (a)", answer, "input_norm.weight", flag)
    answer = desk.finalize(desk.draft(norm_before_fc=True), NO)
    desk.fails("17 (b)", answer, "input_norm.weight", flag)
    chunks = {f"fc_norm.{j}.weight": norm(H) for j in range(3)}
    answer = desk.finalize(desk.draft(add=chunks), NO)
    for name in chunks:
        desk.fails("17 (c)", answer, name, "fc_norm")
    per_head = {f"layers.0.self_attn.{p}_norm.weight": norm(4) for p in "qk"}
    for arch, word in (("qwen3", "LlamaForCausalLMEagle3"), ("llama", "llama")):
        source = desk.draft(add=per_head, layer={"model_type": arch})
        answer = desk.finalize(source, NO, *NEVER)
        for name in per_head:
            desk.fails(f"17 (f) {arch}", answer, name, word)


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
    assert {f["subject"] for f in casts} == {k for k in mixed if "norm" in k}
    error = (mixed["norm.weight"] - mixed["norm.weight"].bfloat16().float()).abs().max()
    (cast,) = [f for f in casts if f["subject"] == "norm.weight"]
    assert "F32" in cast["message"] and "BF16" in cast["message"]
    assert f"{error.item():.3g}" in cast["message"] and error > 0


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
