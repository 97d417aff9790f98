"""The target's three tensors, found as speculators finds them."""

import hashlib
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from huggingface_hub import constants
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from speculators.utils import loading

from spec_export.artifact.resolve import resolve_target
from spec_export.artifact.target import open_target, resolve_name
from spec_export.artifact.values import equals_target
from spec_export.artifact.weights import INDEX, SINGLE
from spec_export.findings import Severity, SpecExportError

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "vocab_size": 32,
    "num_hidden_layers": 6,
    "tie_word_embeddings": False,
}
RNG = np.random.default_rng(0)
EMBEDDING = RNG.normal(size=(32, 8)).astype(np.float32)
HEAD = RNG.normal(size=(32, 8)).astype(np.float32)
NORM = RNG.normal(size=8).astype(np.float32)
LAYER = np.ones((8, 8), np.float32)


def untied() -> dict[str, np.ndarray]:
    return {
        "model.embed_tokens.weight": EMBEDDING,
        "model.layers.0.input_layernorm.weight": np.ones(8, np.float32),
        "model.layers.0.mlp.up_proj.weight": LAYER,
        "model.norm.weight": NORM,
        "lm_head.weight": HEAD,
    }


def model(folder: Path, values: dict | None = None, config: dict = CONFIG) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if values != {}:
        save_file(untied() if values is None else values, folder / SINGLE)
    return folder


def without(*names: str, **more: np.ndarray) -> dict[str, np.ndarray]:
    return {k: v for k, v in untied().items() if k not in names} | more


def failure(call, *args, exit_code=1):
    with pytest.raises(SpecExportError) as caught:
        call(*args)
    assert caught.value.exit_code == exit_code
    return caught.value.findings


def test_facts_and_values(tmp_path):
    target = open_target(model(tmp_path / "T0"))
    assert (target.name, target.revision) == ("T0", None)
    assert target.architectures == ["LlamaForCausalLM"]
    assert (target.hidden_size, target.vocab_size, target.num_hidden_layers) == (
        8,
        32,
        6,
    )
    assert target.has_weights
    assert not target.head_is_tied
    for role, expected in (("embedding", EMBEDDING), ("head", HEAD), ("norm", NORM)):
        assert np.array_equal(target.read(role), expected)
        assert target.digest(role) == hashlib.sha256(expected.tobytes()).hexdigest()
        assert target.packed(role) is None
    assert set(target.tensors) == {
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
    }


def test_rows_in_any_order_and_in_small_blocks(tmp_path):
    target = open_target(model(tmp_path))
    rows = [31, 0, 7, 7]
    assert np.array_equal(target.read("head", rows), HEAD[rows])
    pieces = list(target.iter_rows("head", rows, block_bytes=40))
    assert len(pieces) == 4
    assert np.array_equal(np.concatenate(pieces), HEAD[rows].reshape(-1))


@pytest.mark.parametrize("row", [-1, 32])
def test_a_row_that_does_not_exist(tmp_path, row):
    target = open_target(model(tmp_path))
    (found,) = failure(target.read, "head", [0, row])
    assert f"row {row}" in found.message
    assert "32 rows" in found.message


@pytest.mark.parametrize("flag", [True, False])
def test_a_tied_head_is_the_embedding(tmp_path, flag):
    config = CONFIG | {"tie_word_embeddings": flag}
    target = open_target(model(tmp_path, without("lm_head.weight"), config))
    assert target.head_is_tied
    assert target.find("head").name == "model.embed_tokens.weight"
    assert np.array_equal(target.read("head"), EMBEDDING)
    assert target.digest("head") == target.digest("embedding")


def test_a_head_that_is_there_is_not_tied_whatever_the_flag(tmp_path):
    """Speculators trains with the tensor in the file."""
    target = open_target(model(tmp_path, None, CONFIG | {"tie_word_embeddings": True}))
    assert not target.head_is_tied
    assert np.array_equal(target.read("head"), HEAD)


@pytest.mark.parametrize("key", ["text_config", "llm_config"])
def test_the_language_model_inside(tmp_path, key):
    config = {"architectures": ["X"], key: CONFIG, "hidden_size": 999}
    target = open_target(model(tmp_path, {}, config))
    assert target.hidden_size == 8
    assert target.architectures == ["X"]
    assert not target.has_weights


def test_only_a_config(tmp_path):
    target = open_target(model(tmp_path, {}, CONFIG | {"tie_word_embeddings": True}))
    assert not target.has_weights
    assert target.head_is_tied
    assert target.find("head") is None
    assert target.digest("head") is None
    (found,) = failure(target.read, "head")
    assert found.code == "target-needed"
    assert "--target" in found.hint


PACKED = {
    "integers in place": without("lm_head.weight")
    | {"lm_head.weight": np.ones((32, 1), np.uint8)},
    "scales beside": untied() | {"lm_head.weight_scale": np.ones(32, np.float32)},
    "gptq": without("lm_head.weight")
    | {
        "lm_head.qweight": np.ones((1, 32), np.int32),
        "lm_head.scales": np.ones((1, 32), np.float16),
    },
    "compressed-tensors": without("lm_head.weight")
    | {"lm_head.weight_packed": np.ones((32, 1), np.int32)},
}


@pytest.mark.parametrize("name", PACKED)
def test_a_packed_head_is_not_read_and_not_tied(tmp_path, name):
    target = open_target(model(tmp_path, PACKED[name]))
    assert target.packed("head")
    assert target.packed("embedding") is None
    assert not target.head_is_tied
    assert not equals_target(HEAD, target, "head")
    (found,) = failure(target.read, "head")
    assert found.code == "head-packed"
    assert "lm_head" in found.message


def test_quantised_layers_do_not_pack_the_head(tmp_path):
    layers = {"model.layers.0.mlp.up_proj.weight_scale": np.ones(1, np.float32)}
    assert open_target(model(tmp_path, untied() | layers)).packed("head") is None


# --- shards


def sharded(folder: Path, weight_map: dict[str, str], files: dict) -> Path:
    model(folder, {})
    for file, values in files.items():
        save_file(values, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_only_shards_with_a_role_are_needed(tmp_path):
    roles = {k: v for k, v in untied().items() if "layers" not in k}
    weight_map = dict.fromkeys(roles, "a.safetensors") | {
        "model.layers.0.mlp.up_proj.weight": "b.safetensors"
    }
    target = open_target(sharded(tmp_path, weight_map, {"a.safetensors": roles}))
    assert np.array_equal(target.read("head"), HEAD)
    assert [(f.severity, f.subject) for f in target.findings] == [
        (Severity.WARNING, "b.safetensors")
    ]


def test_a_needed_shard_that_is_missing(tmp_path):
    folder = sharded(tmp_path, {"lm_head.weight": "b.safetensors"}, {})
    (found,) = failure(open_target, folder)
    assert (found.code, found.subject) == ("file-missing", "b.safetensors")


def test_a_shard_that_lacks_what_the_index_says(tmp_path):
    folder = sharded(
        tmp_path,
        dict.fromkeys(untied(), "a.safetensors"),
        {"a.safetensors": without("lm_head.weight")},
    )
    (found,) = failure(open_target, folder)
    assert (found.code, found.subject) == ("file-contradiction", "lm_head.weight")


def test_a_truncated_target(tmp_path):
    folder = model(tmp_path)
    (folder / SINGLE).write_bytes((folder / SINGLE).read_bytes()[:-1])
    (found,) = failure(open_target, folder)
    assert (found.code, found.subject) == ("file-corrupt", SINGLE)


# --- names


PARTS = ["model", "language_model", "llm", "backbone", "layers.0", "visual", "mtp"]
PARTS += ["embed_tokens", "tok_embeddings", "embed", "embeddings", "lm_head", "output"]
PARTS += ["unembed", "norm", "norm_f", "input_layernorm"]
SEGMENTS = st.sampled_from(PARTS)
KEYS = st.lists(SEGMENTS, min_size=1, max_size=3).map(".".join).map("{}.weight".format)


@settings(max_examples=300, deadline=None)
@given(st.lists(KEYS, unique=True, max_size=8))
def test_names_are_found_as_speculators_finds_them(keys):
    names = dict.fromkeys(keys, "f")
    for role, name in (
        ("embedding", "embed_tokens.weight"),
        ("head", "lm_head.weight"),
        ("norm", "model.norm.weight"),
    ):
        assert resolve_name(role, names) == loading._resolve_key(name, names)


# --- equality


def test_equal_after_rounding_both(tmp_path):
    target = open_target(model(tmp_path))
    rounded = HEAD.astype(ml_dtypes.bfloat16)
    assert equals_target(HEAD, target, "head")
    assert equals_target(rounded, target, "head")
    assert equals_target(HEAD, target, "head", dtype="BF16")
    assert equals_target(HEAD[[3, 5]], target, "head", rows=np.array([3, 5]))


def test_what_is_not_equal(tmp_path):
    target = open_target(model(tmp_path))
    moved = HEAD.copy()
    moved[31, 7] = np.nextafter(moved[31, 7], np.float32(9))
    assert not equals_target(moved, target, "head")
    assert equals_target(moved, target, "head", dtype="BF16")
    assert not equals_target(HEAD, target, "embedding")
    assert not equals_target(HEAD[:12], target, "head")
    assert not equals_target(HEAD[[5, 3]], target, "head", rows=np.array([3, 5]))
    assert not equals_target(HEAD.T, target, "head")


def test_without_weights_nothing_is_equal(tmp_path):
    assert not equals_target(HEAD, open_target(model(tmp_path, {})), "head")


def test_a_difference_in_a_late_block(tmp_path):
    big = np.ones((600, 1024), np.float32)
    values = {"embed_tokens.weight": big}
    target = open_target(model(tmp_path, values))
    other = big.copy()
    assert equals_target(other, target, "embedding")
    other[599, 1023] = 2
    assert not equals_target(other, target, "embedding")


# --- where it is


def test_an_explicit_target_wins_and_has_to_exist(tmp_path):
    model(tmp_path / "stored")
    explicit = model(tmp_path / "explicit")
    target, findings = resolve_target(str(tmp_path / "stored"), None, explicit)
    assert (target.name, findings) == ("explicit", [])
    for absent in (tmp_path / "no", tmp_path):
        (found,) = failure(
            resolve_target, str(tmp_path / "stored"), None, absent, exit_code=2
        )
        assert found.code == "path-missing"


def test_an_absolute_path(tmp_path):
    target, findings = resolve_target(str(model(tmp_path / "T")), None)
    assert (target.name, findings) == ("T", [])
    target, (found,) = resolve_target(str(tmp_path / "gone"), None)
    assert target is None
    assert "--target" in found.hint


def test_a_relative_path_is_looked_for_around_the_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model(tmp_path / "project" / "tiny" / "verifier")
    checkpoint = tmp_path / "project" / "runs" / "a" / "3"
    checkpoint.mkdir(parents=True)
    target, (found,) = resolve_target("tiny/verifier", checkpoint)
    assert target.name == "verifier"
    assert (found.code, found.severity) == ("target-path-relative", Severity.INFO)
    deep = checkpoint / "w" / "x" / "y"
    deep.mkdir(parents=True)
    target, (found,) = resolve_target("tiny/verifier", deep)
    assert target is None
    assert (found.code, found.severity) == ("target-path-relative", Severity.WARNING)
    assert str(deep) in found.message
    assert "--target" in found.hint


def test_the_working_directory_comes_first(tmp_path, monkeypatch):
    model(tmp_path / "cwd" / "T", None, CONFIG | {"num_hidden_layers": 1})
    model(tmp_path / "ckpt" / "T", None, CONFIG | {"num_hidden_layers": 2})
    monkeypatch.chdir(tmp_path / "cwd")
    assert resolve_target("T", tmp_path / "ckpt")[0].num_hidden_layers == 1
    assert resolve_target("T", tmp_path / "ckpt")[1][0].severity is Severity.INFO


def test_no_name_at_all(tmp_path):
    for nothing in (None, ""):
        target, (found,) = resolve_target(nothing, tmp_path)
        assert target is None
        assert found.code == "target-weights-missing"


def test_a_hub_id_is_looked_up_in_the_local_cache_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    commit = "a" * 40
    repo = tmp_path / "models--org--tiny.model"
    snapshot = model(repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    beside = snapshot / "hf_quant_config.json"
    beside.write_text('{"quantization": {"quant_algo": "FP8"}}')
    for target in (
        open_target("org/tiny.model"),
        resolve_target("org/tiny.model", tmp_path)[0],
        open_target(snapshot),
    ):
        assert (target.name, target.revision) == ("org/tiny.model", commit)
        assert target.config["quantization_config"] == {"quant_algo": "FP8"}
        assert np.array_equal(target.read("head"), HEAD)
    for own, taken in ((None, "FP8"), ({"quant_algo": "NVFP4"}, "NVFP4")):
        config = json.loads((snapshot / "config.json").read_text())
        config["quantization_config"] = own  # null is as if it were not there
        (snapshot / "config.json").write_text(json.dumps(config))
        settings = open_target(snapshot).config["quantization_config"]
        assert settings == {"quant_algo": taken}
    (found,) = failure(open_target, "org/other", exit_code=2)
    assert found.code == "path-missing"
    assert resolve_target("org/other", tmp_path)[0] is None
