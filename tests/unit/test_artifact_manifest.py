"""The manifest: one schema, canonical bytes, nothing private; and the file check."""

import getpass
import json
import math
import signal
import subprocess
import sys
import tracemalloc
from hashlib import sha256
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_export.artifact import privacy
from spec_export.artifact import verify_files as module
from spec_export.artifact.manifest import (
    EMBEDDED,
    MANIFEST_NAME,
    METADATA_KEY,
    SCHEMA,
    FileEntry,
    Manifest,
    canonical_json,
    embedded_json,
    json_schema,
    weights_metadata,
)
from spec_export.artifact.privacy import find_leaks, scrub, scrub_recipe
from spec_export.artifact.verify_files import verify_files
from spec_export.artifact.weights import INDEX, SINGLE
from spec_export.artifact.writer import Entry, write_file, write_weights
from spec_export.findings import SpecExportError

ROOT = Path(__file__).parents[2]
SHA = "0" * 64


def manifest(**changes) -> Manifest:
    content = {
        "run_id": "r1",
        "status": "saved",
        "serving": {
            "min_version": "0.5.10",
            "max_known_version": "0.5.23",
            "algorithm": "EAGLE3",
            "architecture": "LlamaForCausalLMEagle3",
            "requires_plugin": False,
            "launch": ["--model-path", "{target}"],
        },
        "tensors": {},
        "config_changes": [
            {"key": "dtype", "from": None, "to": "bfloat16", "rule": "both spellings"}
        ],
    }
    return Manifest.model_validate(content | changes)


# --- schema


def test_the_committed_schema_is_the_one_of_the_code():
    committed = json.loads(
        (ROOT / "ckpt_templates" / "manifest.schema.json").read_text()
    )
    assert committed == json_schema()


def test_the_schema_accepts_what_is_written_and_refuses_what_is_not():
    validator = jsonschema.Draft202012Validator(json_schema())
    content = json.loads(manifest().to_bytes())
    validator.validate(content)
    for key in ("schema", "run_id", "status", "serving", "tensors"):
        with pytest.raises(jsonschema.ValidationError):
            validator.validate({k: v for k, v in content.items() if k != key})
    with pytest.raises(jsonschema.ValidationError):
        validator.validate(content | {"status": "done"})
    with pytest.raises(jsonschema.ValidationError):
        validator.validate(content | {"files": {"a": {"sha256": "x", "size": 1}}})


def test_the_keys_of_the_contract():
    content = json.loads(manifest(files={"a": {"sha256": SHA, "size": 3}}).to_bytes())
    assert set(content) == {
        *("schema", "run_id", "status", "files", "serving", "target_model"),
        *("tensors", "provided_by_target", "dropped", "config_changes", "vocab"),
        *("comparison", "training", "deviations", "findings"),
    }
    assert content["schema"] == SCHEMA
    assert content["files"]["a"] == {"sha256": SHA, "size": 3}
    assert content["config_changes"][0]["from"] is None


# --- reading and writing


def test_round_trip(tmp_path):
    written = manifest()
    written.write(tmp_path)
    assert Manifest.read(tmp_path) == written
    assert (tmp_path / MANIFEST_NAME).read_bytes() == written.to_bytes()


def test_a_reader_ignores_keys_of_a_later_minor_version(tmp_path):
    content = json.loads(manifest().to_bytes())
    content["new"] = 1
    content["serving"]["new"] = {"a": 1}
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(content))
    assert Manifest.read(tmp_path) == manifest()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no manifest"),
        ("[]", "schema is None"),
        ("{}", "no manifest"),
        ("[" * 100_000, "no manifest"),
        ('{"schema": "urn:spec-export:manifest:v2"}', "v2"),
        ('{"schema": ["urn:spec-export:manifest:v1"]}', "schema is"),
        ('{"schema": "urn:spec-export:manifest:v1"}', "run_id"),
    ],
)
def test_a_manifest_that_cannot_be_read(tmp_path, text, words):
    (tmp_path / MANIFEST_NAME).write_text(text)
    with pytest.raises(SpecExportError) as caught:
        Manifest.read(tmp_path)
    assert caught.value.exit_code == 1
    (found,) = caught.value.findings
    assert found.code == "manifest-invalid"
    assert words in found.message


def test_no_manifest(tmp_path):
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(SpecExportError) as caught:
            Manifest.read(folder)
        assert caught.value.findings[0].code == "manifest-missing"


def test_a_bad_field_is_named(tmp_path):
    content = json.loads(manifest().to_bytes())
    content["files"] = {"a": {"sha256": "zz", "size": 1}}
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(content))
    with pytest.raises(SpecExportError, match=r"files\.a\.sha256"):
        Manifest.read(tmp_path)


# --- canonical bytes


def test_numbers_that_json_cannot_hold():
    content = {"a": math.nan, "b": [math.inf], "c": 2**60, "d": 2**53 - 1, "e": True}
    assert json.loads(canonical_json(content)) == {
        "a": None,
        "b": [None],
        "c": str(2**60),
        "d": 2**53 - 1,
        "e": True,
    }


def test_numpy_scalars_and_tuples_are_plain():
    content = {"a": np.float32(0.5), "b": np.int64(3), "c": (1, np.bool_(True))}
    assert canonical_json(content) == b'{"a":0.5,"b":3,"c":[1,true]}'


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(-1e15, 1e15)
    | st.text("aé€😀/", max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("abé😀", max_size=3), inner, max_size=3)
    ),
    max_leaves=10,
)


@settings(max_examples=200, deadline=None)
@given(JSON)
def test_bytes_do_not_depend_on_the_order_of_keys(content):
    def reordered(value):
        if isinstance(value, dict):
            return {k: reordered(v) for k, v in reversed(value.items())}
        return [reordered(v) for v in value] if isinstance(value, list) else value

    data = canonical_json(content)
    assert canonical_json(reordered(content)) == data
    assert canonical_json(json.loads(data)) == data


def test_the_embedded_part_knows_nothing_of_status_or_files():
    one = manifest()
    final = manifest(
        status="final",
        files={"a": {"sha256": SHA, "size": 3}},
        comparison={"layout": {"ran": True, "verdict": "pass"}},
        findings=[{"code": "x", "severity": "info", "subject": "s", "message": "m"}],
    )
    assert embedded_json(one) == embedded_json(final)
    assert set(json.loads(embedded_json(one))) == set(EMBEDDED)
    assert embedded_json(one) != embedded_json(manifest(run_id="r2"))
    assert weights_metadata(one) == {
        "format": "pt",
        METADATA_KEY: embedded_json(one),
    }


# --- privacy


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("/home/someone/runs/3", "3"),
        ("/home/some one/my runs", "my runs"),
        ("~/runs/3", "3"),
        ("~someone/runs/3", "3"),
        ("looked in /data/x/y, /mnt/z", "looked in y, z"),
        ("dir:/home/someone/x", "dir:x"),
        ("path=/a/b/c", "path=c"),
        ("file:///home/someone/m", "m"),
        ("C:\\Users\\someone\\m.bin", "m.bin"),
        ("\\\\server\\share\\m.bin", "m.bin"),
        ("http://me:secret@host/x", "http://host/x"),
        ("use hf_abcdefghijklmnopqrst now", "use [removed] now"),
        ("Bearer abcdefghijklmnop1234", "[removed]"),
    ],
)
def test_private_text(text, clean):
    assert scrub(text) == clean
    assert find_leaks({"a": [text]}) == ["a[0]"]
    assert find_leaks(scrub({text: text})) == []


@pytest.mark.parametrize(
    "text",
    [
        "layers.0.self_attn.q_proj.weight",
        "meta-llama/Llama-3.1-8B",
        "no q/k norm, w/o bias, and / or",
        "{target}",
        "--model-path {target}/x",
        "https://huggingface.co/org/name",
        "runs/3",
        "./runs/3",
        "../x",
        SHA,
        "a / b",
        "1/3",
        "0.5.4.post2",
        "",
    ],
)
def test_public_text_stays(text):
    assert scrub({text: [text]}) == {text: [text]}
    assert find_leaks({text: text}) == []


def test_user_and_host_names(monkeypatch):
    monkeypatch.setattr(getpass, "getuser", lambda: "jdoe")
    monkeypatch.setattr("socket.gethostname", lambda: "gpu-box-7.corp.example")
    privacy._private_names.cache_clear()
    try:
        assert scrub("trained by jdoe on gpu-box-7") == (
            "trained by [removed] on [removed]"
        )
        assert scrub("jdoes gpu-box-77") == "jdoes gpu-box-77"
    finally:
        privacy._private_names.cache_clear()


def test_a_common_user_name_is_no_secret(monkeypatch):
    monkeypatch.setattr(getpass, "getuser", lambda: "root")
    monkeypatch.setattr("socket.gethostname", lambda: "localhost")
    privacy._private_names.cache_clear()
    try:
        assert scrub("the root of it") == "the root of it"
    finally:
        privacy._private_names.cache_clear()


def test_a_recipe_loses_loggers_endpoints_and_tokens():
    recipe = {
        "train": {
            "model": {"verifier_name_or_path": "/models/org/llama"},
            "trainer": {"epochs": 3, "save_path": "/scratch/me/out", "log_freq": 1},
            "logging": {"logger": "wandb", "run_name": "secret-project"},
            "backend": {"vllm_endpoint": "http://10.0.0.1:8000/v1", "port": 3},
            "draft": {"mask_token_id": 31, "num_layers": 1, "hidden_act": "silu"},
            "hf_token": "x",
        },
        "callbacks": [{"init_args": {"output_dir": "exports", "api_key": "y"}}],
    }
    assert scrub_recipe(recipe) == {
        "train": {
            "model": {"verifier_name_or_path": "llama"},
            "trainer": {"epochs": 3, "save_path": "out", "log_freq": 1},
            "backend": {},
            "draft": {"mask_token_id": 31, "num_layers": 1, "hidden_act": "silu"},
        },
        "callbacks": [{"init_args": {"output_dir": "exports"}}],
    }
    assert recipe["train"]["hf_token"] == "x"


def test_nothing_private_is_written():
    private = "/home/someone/secret"
    data = manifest(
        training={"recipe": {"logging": {"logger": "wandb"}, "p": private}},
        findings=[
            {
                "code": "x",
                "severity": "info",
                "subject": "t",
                "message": f"looked in {private}",
            }
        ],
        target_model={"name": private},
    ).to_bytes()
    content = json.loads(data)
    assert b"someone" not in data
    assert b"wandb" not in data
    assert content["training"]["recipe"] == {"p": "secret"}
    assert content["target_model"]["name"] == "secret"
    assert find_leaks(content) == []


# --- the files


@pytest.fixture
def export(tmp_path):
    """An export of two tensors in one file."""
    return make_export(tmp_path / "export")


def make_export(folder: Path, max_shard_size: int | None = None) -> Path:
    folder.mkdir()
    arrays = {"fc.weight": np.ones((4, 6), np.float32), "d2t": np.arange(4)}
    kinds = {"fc.weight": "F32", "d2t": "I64"}
    entries = [
        Entry(name, kinds[name], array.shape, lambda a=array: a)
        for name, array in arrays.items()
    ]
    content = manifest(
        tensors={
            e.name: {
                "role": "trained",
                "source": [e.name],
                "dtype": e.dtype,
                "shape": list(e.shape),
                "sha256": sha256(arrays[e.name].tobytes()).hexdigest(),
            }
            for e in entries
        }
    )
    written = write_weights(folder, entries, weights_metadata(content), max_shard_size)
    files = written.files | {
        "config.json": write_file(folder / "config.json", b"{}"),
    }
    content.files = {
        name: FileEntry(sha256=fact.sha256, size=fact.size)
        for name, fact in files.items()
    }
    content.write(folder)
    return folder


def check(folder: Path) -> list[tuple[str, str]]:
    return [(f.code, f.subject) for f in verify_files(folder, Manifest.read(folder))]


def edit(folder: Path, change) -> None:
    content = json.loads((folder / MANIFEST_NAME).read_text())
    change(content)
    (folder / MANIFEST_NAME).write_text(json.dumps(content))


def test_a_sound_export(export):
    assert check(export) == []


def test_a_sound_export_in_shards(tmp_path):
    folder = make_export(tmp_path / "s", 50)
    assert (folder / INDEX).is_file()
    assert check(folder) == []


def test_files_beside_that_nobody_loads(export):
    (export / "README.md").write_text("x")
    (export / "probe").mkdir()
    (export / "probe" / "probe.safetensors").write_bytes(b"")
    assert check(export) == []


@pytest.mark.parametrize(
    "name", ["extra.safetensors", "pytorch_model.bin", "x.pt", "x.gguf", INDEX]
)
def test_an_unlisted_file(export, name):
    (export / name).write_bytes(b"")
    assert check(export) == [("file-unlisted", name)]


@pytest.mark.parametrize("where", [8, -1])
def test_a_flipped_bit(export, where):
    data = bytearray((export / SINGLE).read_bytes())
    data[where] ^= 1
    (export / SINGLE).write_bytes(data)
    assert check(export) == [("file-changed", SINGLE)]


@pytest.mark.parametrize("number", range(4))
def test_a_flipped_bit_in_one_of_several_files(tmp_path, number):
    """Files are read side by side; each is held against its own digest."""
    folder = make_export(tmp_path / "s", 50)
    names = sorted(Manifest.read(folder).files)
    assert len(names) == 4  # two shards, their index, config.json
    data = bytearray((folder / names[number]).read_bytes())
    data[-1] ^= 1
    (folder / names[number]).write_bytes(data)
    assert check(folder) == [("file-changed", names[number])]


def fails(monkeypatch, name: str, problem: Exception) -> list[str]:
    """Let the reading of one file fail; returns the names that are read."""
    hash_file, read = module.hash_file, []

    def failing(path, stop):
        read.append(path.name)
        if path.name == name:
            raise problem
        return hash_file(path, stop)

    monkeypatch.setattr(module, "hash_file", failing)
    return read


def test_a_file_that_the_disk_does_not_give(tmp_path, monkeypatch):
    folder = make_export(tmp_path / "s", 50)
    fails(monkeypatch, INDEX, OSError(5, "Input/output error"))
    (found,) = verify_files(folder, Manifest.read(folder))
    assert (found.code, found.subject) == ("file-corrupt", INDEX)
    assert "Input/output error" in found.message


def test_a_bug_in_a_reader_is_no_silence(export, monkeypatch):
    fails(monkeypatch, SINGLE, RuntimeError("on purpose"))
    with pytest.raises(RuntimeError, match="on purpose"):
        check(export)


def test_a_file_of_another_size_is_not_read(export, monkeypatch):
    with (export / SINGLE).open("ab") as file:
        file.write(b"1")
    read = fails(monkeypatch, "", OSError())
    assert check(export) == [("file-changed", SINGLE)]
    assert read == ["config.json"]


def add_holes(folder: Path, count: int, size: int) -> None:
    """List files of zeros that take no room; their digests are wrong."""
    names = [f"{number}.npy" for number in range(count)]
    for name in names:
        with (folder / name).open("wb") as file:
            file.truncate(size)
    facts = {name: {"sha256": SHA, "size": size} for name in names}
    edit(folder, lambda m: m["files"].update(facts))


def test_large_files_need_little_memory(export):
    add_holes(export, 8, 16 << 20)
    content = Manifest.read(export)
    tracemalloc.start()
    try:
        assert len(verify_files(export, content)) == 8
        _, peak = tracemalloc.get_traced_memory()
        assert peak < 8 << 20
        (export / "0.npy").read_bytes()  # the control: one file as a whole
        assert tracemalloc.get_traced_memory()[1] > 8 << 20
    finally:
        tracemalloc.stop()


def test_a_signal_waits_for_no_file(export):
    add_holes(export, 6, 1 << 36)  # minutes
    code = (
        "from spec_export.artifact import manifest, verify_files as v\n"
        "hash_file = v.hash_file\n"
        "def told(path, stop):\n"
        "    print(path.name, flush=True)\n"
        "    return hash_file(path, stop)\n"
        "v.hash_file = told\n"
        f"v.verify_files({str(export)!r}, manifest.Manifest.read({str(export)!r}))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
    ) as running:
        try:
            assert running.stdout is not None
            assert running.stdout.readline()  # they read
            with pytest.raises(subprocess.TimeoutExpired):
                running.wait(0.3)
            running.send_signal(signal.SIGINT)
            assert running.wait(20) == -signal.SIGINT
        finally:
            running.kill()


def test_a_file_of_another_size(export):
    with (export / "config.json").open("a") as file:
        file.write(" ")
    (found,) = verify_files(export, Manifest.read(export))
    assert (found.code, found.subject) == ("file-changed", "config.json")
    assert "3 bytes" in found.message
    assert "says 2" in found.message


def test_a_wrong_size_in_the_manifest(export):
    edit(export, lambda m: m["files"]["config.json"].update(size=9))
    assert check(export) == [("file-changed", "config.json")]


def test_a_missing_file(export):
    (export / "config.json").unlink()
    assert check(export) == [("file-missing", "config.json")]


def test_a_config_that_nobody_vouches_for(export):
    edit(export, lambda m: m["files"].pop("config.json"))
    assert check(export) == [("file-missing", "config.json")]


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "a\\..\\x"])
def test_a_listed_path_that_leads_out(export, name):
    (export.parent / "x").write_bytes(b"")
    edit(export, lambda m: m["files"].update({name: {"sha256": SHA, "size": 0}}))
    assert check(export) == [("path-escape", name)]


def test_a_link_that_leads_out(export):
    outside = export.parent / "outside.json"
    (export / "config.json").rename(outside)
    (export / "config.json").symlink_to(outside)
    assert check(export) == [("path-escape", "config.json")]


def test_the_links_of_a_hub_cache(tmp_path):
    folder = make_export(tmp_path / "e")
    snapshot = tmp_path / "models--o--n" / "snapshots" / "c0"
    blobs = tmp_path / "models--o--n" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in folder.iterdir():
        path.rename(blobs / path.name)
        (snapshot / path.name).symlink_to(blobs / path.name)
    assert check(snapshot) == []


def test_a_tensor_that_the_manifest_does_not_describe(export):
    def forget(content):
        del content["tensors"]["d2t"]
        content["tensors"]["other"] = content["tensors"]["fc.weight"]

    edit(export, forget)
    assert check(export) == [
        ("file-contradiction", "d2t"),
        ("file-contradiction", "other"),
        ("file-contradiction", SINGLE),
    ]


def test_a_tensor_of_another_shape(export):
    edit(export, lambda m: m["tensors"]["fc.weight"].update(shape=[6, 4]))
    found = verify_files(export, Manifest.read(export))
    assert [(f.code, f.subject) for f in found] == [
        ("file-contradiction", "fc.weight"),
        ("file-contradiction", SINGLE),
    ]
    assert "[4, 6]" in found[0].message
    assert "[6, 4]" in found[0].message


def test_an_embedded_manifest_that_says_something_else(export):
    edit(export, lambda m: m["serving"].update(launch=["--evil"]))
    (found,) = verify_files(export, Manifest.read(export))
    assert (found.code, found.subject) == ("file-contradiction", SINGLE)
    assert "serving" in found.message


@pytest.mark.parametrize("embedded", [None, "{", "[]", '{"schema": "x"}'])
def test_weights_with_another_embedded_manifest(export, embedded):
    metadata = {"format": "pt"} | ({METADATA_KEY: embedded} if embedded else {})
    entries = [
        Entry("fc.weight", "F32", (4, 6), lambda: np.ones((4, 6), np.float32)),
        Entry("d2t", "I64", (4,), lambda: np.arange(4)),
    ]
    fact = write_weights(export, entries, metadata).files[SINGLE]
    edit(export, lambda m: m["files"].update({SINGLE: fact._asdict()}))
    assert check(export) == [("file-contradiction", SINGLE)]


def test_an_index_that_points_elsewhere(tmp_path):
    folder = make_export(tmp_path / "s", 50)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["d2t"] = index["weight_map"]["fc.weight"]
    fact = write_file(folder / INDEX, json.dumps(index).encode())
    edit(folder, lambda m: m["files"].update({INDEX: fact._asdict()}))
    assert check(folder) == [("file-contradiction", "d2t")]


def test_the_sha_of_the_file_is_the_last_word(export):
    """Two tensors of one shape that swap their names keep size and shapes."""
    data = (export / SINGLE).read_bytes()
    (export / SINGLE).write_bytes(data.replace(b"fc.weight", b"cf.weight"))
    assert ("file-changed", SINGLE) in check(export)


def test_reading_a_manifest_needs_no_numpy_and_no_torch(export):
    code = (
        "import sys; from spec_export.artifact.manifest import Manifest;"
        f"Manifest.read({str(export)!r});"
        "print(sorted({'numpy', 'torch', 'ml_dtypes'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]", done.stderr
