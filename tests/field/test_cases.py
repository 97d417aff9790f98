"""The cases from the field that EAGLE-3 can meet, numbered as they were reported.

T0 and E0 are those of ``tests/helpers/field.py``. Server profiles: ``OLD`` is
SGLang 0.5.9, ``NEW`` 0.5.23.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from spec_export.artifact.target import open_target
from spec_export.comparison import leg_of_probe
from tests.field.desk import (
    NEW,
    OLD,
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
WRITTEN_IDS = f"eagle_config.{IDS}"  # where a folder's config.json holds them
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
    desk.warned("2 new, verified for old", back, WRITTEN_IDS, "0.5.11")
    assert "--disable-cuda-graph" in back.of("warning")[0]["hint"]


def test_case_2_a_hand_made_folder_with_the_newer_names(desk: Desk) -> None:
    export = desk.finalize(desk.draft(), NO).output
    assert export is not None
    folder = rename_tensors(
        copy_export(export, desk.new("hand")), {"midlayer.": "layers.0."}
    )
    old = desk.verify(folder, "--sglang", OLD)
    lost = [n for n in sorted(names_of(folder)) if n.startswith("layers.0.")]
    assert len(lost) == 10
    # Each is told once: what they would set is not told as missing besides.
    assert lost == [f["subject"] for f in old.of("error")]
    desk.fails("2 hand-made layers.0, old", old, lost[0], OLD, "0.5.12")
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
