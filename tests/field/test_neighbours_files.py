"""Neighbours of the cases about files and formats (19, 21), and paths."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.field.desk import (
    Desk,
)
from tests.field.test_cases import NO
from tests.field.test_cases_files import sharded, write_index
from tests.helpers.field import (
    H,
    draft_tensors,
    make_target,
)

LAYER = "transformer_layer_config"
INDEX = "model.safetensors.index.json"


# ----------------------------------------------------------------------- 19: dtypes
@pytest.mark.parametrize(
    "dtype, option, wanted",
    [
        (torch.float16, None, torch.float16),
        (torch.float32, None, torch.float32),
        (torch.float32, "bfloat16", torch.bfloat16),
        (torch.float64, "float32", torch.float32),
    ],
    ids=str,
)
def test_19_uniform_dtypes_are_kept(
    desk: Desk, dtype: torch.dtype, option: str | None, wanted: torch.dtype
) -> None:
    tensors = {
        k: v.to(dtype) if v.is_floating_point() else v
        for k, v in draft_tensors(desk.target).items()
    }
    options = () if option is None else ("--dtype", option)
    answer = desk.finalize(desk.draft(tensors), *options)
    desk.ok(f"19 {dtype} {option or ''}".rstrip(), answer)
    assert answer.tensors["fc.weight"].dtype == wanted
    assert answer.config["dtype"] == str(wanted).removeprefix("torch.")


@pytest.mark.parametrize(
    ("name", "content", "quantised"),
    [
        ("config.json", {"quantization_config": {"quant_method": "fp8"}}, True),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}, True),
        ("hf_quant_config.json", {"quant_algo": "NVFP4"}, True),
        ("hf_quant_config.json", {"quantization": {"quant_algo": None}}, False),
        ("hf_quant_config.json", {"producer": {"name": "modelopt"}}, False),
    ],
)
def test_19_a_quantised_target_needs_a_flag(
    desk: Desk, name: str, content: dict[str, Any], quantised: bool
) -> None:
    """ModelOpt leaves its settings in config.json or in a file of their own."""
    target = make_target(desk.root / "T1")
    path = target / name
    held = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(held | content))
    case = f"19 target {name} {json.dumps(content)}"
    answer = desk.ok(case, desk.finalize(desk.draft(target=target)))
    assert ("unquant" in answer.manifest["serving"]["launch"]) is quantised
    assert "quantization_config" not in answer.config


def test_19_what_modelopt_wrote_cannot_be_read(desk: Desk) -> None:
    target = make_target(desk.root / "T1")
    (target / "hf_quant_config.json").write_text("{")
    answer = desk.finalize(desk.draft(target=target), NO)
    desk.fails("19 broken hf_quant_config.json", answer, "hf_quant_config.json", "JSON")


def test_19_a_dtype_that_no_export_has(desk: Desk) -> None:
    answer = desk.finalize(desk.draft(), NO, "--dtype", "int8")
    desk.fails("19 --dtype int8", answer, "--dtype", "int8", code=2)


# ------------------------------------------------------------------------ 21: files
def test_21_sources_with_files_left_over(desk: Desk) -> None:
    source = desk.draft()
    held = load_file(source / "model.safetensors")
    stray = source / "model-00002-of-00002.safetensors"
    save_file({"fc.weight": held["fc.weight"]}, stray)
    desk.ok("21 leftover, same values", desk.finalize(source, NO))
    save_file({"fc.weight": held["fc.weight"] * 2}, stray)
    answer = desk.finalize(source, NO)
    desk.fails("21 leftover, other values", answer, "fc.weight", stray.name)


def test_21_names_that_lead_out_of_the_folder(desk: Desk) -> None:
    source, weight_map = sharded(desk)
    outside = desk.root / "outside.safetensors"
    save_file({"fc.weight": torch.ones(H, 24)}, outside)
    for name in ("../outside.safetensors", str(outside)):
        write_index(source, weight_map | {"fc.weight": name})
        desk.fails("21 index, outside", desk.finalize(source, NO), INDEX, name)


def test_21_a_truncated_file(desk: Desk) -> None:
    source = desk.draft()
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    desk.fails("21 truncated", desk.finalize(source, NO), path.name, "truncated")


def test_21_one_name_twice_in_a_header(desk: Desk) -> None:
    source = desk.draft()
    path = source / "model.safetensors"
    header = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
    header += b'"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}'
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"ab")
    desk.fails("21 a name twice", desk.finalize(source, NO), path.name, "'a' twice")


def test_21_weights_of_another_format(desk: Desk) -> None:
    source = desk.draft()
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    answer = desk.finalize(source, NO)
    desk.fails("21 .bin", answer, "pytorch_model.bin", "safetensors", code=2)


def test_21_exports_that_were_tampered_with(desk: Desk) -> None:
    export = desk.finalize(desk.draft(), NO).output
    assert export is not None
    weights, config = export / "model.safetensors", export / "config.json"
    whole = weights.read_bytes()
    flipped = bytearray(whole)
    flipped[-20] ^= 1
    weights.write_bytes(bytes(flipped))
    desk.fails("21 verify, one bit", desk.verify(export), weights.name, "SHA-256")
    zeroed = whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2)
    weights.write_bytes(zeroed)
    desk.fails("21 verify, zero tail", desk.verify(export), weights.name, "SHA-256")
    weights.write_bytes(whole)
    text = config.read_text()
    config.write_text(text.replace('"fc_norm": false', '"fc_norm": true'))
    desk.fails("21 verify, config", desk.verify(export), config.name, "bytes")
    config.write_text(text)
    desk.ok("21 verify, as it was", desk.verify(export))
    weights.unlink()
    answer = desk.verify(export)
    desk.fails("21 verify, no weights", answer, weights.name, "not there")


def test_21_force_deletes_nothing_but_models(desk: Desk) -> None:
    source, output = desk.draft(), desk.new("export")
    output.mkdir()
    (output / "thesis.odt").write_text("mine")
    answer = desk.run("finalize", source, "--output", output, NO, "--force")
    desk.fails("21 --force, a stranger", answer, output.name, "thesis.odt", code=2)
    assert (output / "thesis.odt").read_text() == "mine"


def test_21_an_old_export_survives_a_failed_one(desk: Desk) -> None:
    good, bad = desk.draft(), desk.draft(drop=("norm.weight",))
    output = desk.finalize(good, NO).output
    assert output is not None
    before = {p.name: p.read_bytes() for p in output.iterdir() if p.is_file()}
    answer = desk.run("finalize", bad, "--output", output, NO, "--force")
    desk.fails("21 --force, failed", answer, "norm.weight", "not in")
    assert {p.name: p.read_bytes() for p in output.iterdir() if p.is_file()} == before


# ------------------------------------------------------------------- paths, contexts
def test_a_path_that_sglang_takes_for_a_mistral_folder(desk: Desk) -> None:
    output = desk.root / "eagle3-mistral-7b"
    answer = desk.finalize(desk.draft(), NO, output=output)
    desk.warned("path eagle+mistral", answer, output.name, "Mistral")
    desk.warned("path, verify", desk.verify(output), output.name, "Mistral")


def test_a_context_shorter_than_the_targets(desk: Desk) -> None:
    source = desk.draft(layer={"max_position_embeddings": 32})
    answer = desk.finalize(source)
    subject = "max_position_embeddings"
    desk.warned("short context", answer, f"{LAYER}.{subject}", "32", "64")
    assert answer.output is not None
    verified = desk.verify(answer.output)
    desk.warned("short context, verify", verified, subject, "32", "64")
