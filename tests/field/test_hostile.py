"""Files that lie: random and mutated headers, indexes, configurations, manifests.

Whatever they say, `finalize` and `verify` answer with 0, 1 or 2 and one JSON object:
no traceback (101), no hang, no byte read from outside the folders that were given.
More examples: ``SPEC_EXPORT_EXAMPLES=2000``.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.field.desk import Answer, Desk
from tests.field.test_cases import NO
from tests.field.test_cases_files import shards, write_index
from tests.helpers.field import draft_config, draft_tensors, write_draft

EXAMPLES = int(os.environ.get("SPEC_EXPORT_EXAMPLES", "20"))
WEIGHTS, CONFIG = "model.safetensors", "config.json"
INDEX, MANIFEST = "model.safetensors.index.json", "spec_export_manifest.json"
SECRET = "secret.safetensors"

hostile = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize="SPEC_EXPORT_EXAMPLES" not in os.environ,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

# What a JSON file may hold in place of what belongs there.
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.sampled_from([0, 1, -1, 2, 12, 32, 2**31, 2**62, 10**30, 10**400])
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(
        ["", ".", "..", f"../{SECRET}", "/dev/zero", "a\0b", "llama", "d2t", "BF16"]
    )
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner)
    ),
    max_leaves=6,
)


# --------------------------------------------------------- which files are opened
_OPENED: list[str] | None = None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _OPENED is not None and isinstance(arguments[0], str):
        _OPENED.append(os.path.realpath(arguments[0]))


@pytest.fixture(scope="module", autouse=True)
def _watch() -> None:
    """An audit hook sees every open of this process; it cannot be removed."""
    sys.addaudithook(_audit)


@contextmanager
def watched() -> Iterator[list[str]]:
    """The files that are opened meanwhile, links resolved."""
    global _OPENED
    _OPENED = []
    try:
        yield _OPENED
    finally:
        _OPENED = None


@dataclass
class Scene:
    """A draft, an export and a secret beside them, made once.

    Attributes:
        desk: With T0.
        source: E0 as one file.
        sharded: E0 in three files with an index.
        export: E0's export.
    """

    desk: Desk
    source: Path
    sharded: Path
    export: Path

    def copy(self, folder: Path) -> Path:
        """A copy of a folder that an example may destroy."""
        to = self.desk.root / "mutant"
        shutil.rmtree(to, ignore_errors=True)
        shutil.copytree(folder, to)
        return to

    def answers(self, folder: Path, command: str, named: bool = True) -> Answer:
        """Run a command on a folder and hold what is promised of every answer.

        Args:
            folder: The folder.
            command: ``finalize`` or ``verify``.
            named: Whether the target is given, or the folder has to say it.
        """
        output = self.desk.root / "out"
        options: tuple[Any, ...] = ("--target", self.desk.target) if named else ()
        if command == "finalize":
            options = (*options, "--output", output, NO)
        with watched() as opened:
            answer = self.desk.run(command, folder, *options)
        assert answer.code in (0, 1, 2), answer.data
        assert (answer.code == 0) != bool(answer.of("error"))
        assert not [path for path in opened if path.endswith(SECRET)]
        if command == "finalize":
            assert output.exists() == (answer.code == 0)
            shutil.rmtree(output, ignore_errors=True)
            assert not list(self.desk.root.glob(".*-*"))
        return answer


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    desk = Desk(tmp_path_factory.mktemp("hostile"), [])
    tensors = draft_tensors(desk.target)
    source = desk.draft()
    config = draft_config(desk.target)
    split = write_draft(desk.root / "shards", config, tensors)
    names = sorted(tensors)
    shards(split, [{n: tensors[n] for n in names[i::3]} for i in range(3)])
    export = desk.finalize(source, NO).output
    assert export is not None
    shutil.copy(source / WEIGHTS, desk.root / SECRET)
    return Scene(desk, source, split, export)


# ------------------------------------------------------------------ mutated files
def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every path into a JSON value."""
    yield at
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, inner in items:
        yield from places(inner, (*at, key))


def mutated(data: st.DataObject, content: Any) -> Any:
    """Replace, remove or add at one to three places."""
    content = copy.deepcopy(content)
    for _ in range(data.draw(st.integers(1, 3), "changes")):
        path = data.draw(st.sampled_from(list(places(content))), "place")
        if not path:
            if data.draw(st.booleans(), "whole"):
                return data.draw(values, "content")
            continue
        parent = content
        for key in path[:-1]:
            parent = parent[key]
        action = data.draw(st.sampled_from(["set", "set", "remove", "add"]), "action")
        if action == "remove":
            del parent[path[-1]]
        elif action == "add" and isinstance(parent, dict):
            parent[data.draw(st.text(max_size=8), "key")] = data.draw(values, "value")
        else:
            parent[path[-1]] = data.draw(values, "value")
    return content


def json_bytes(data: st.DataObject, content: Any) -> bytes:
    """A mutated JSON file: its content, or its bytes."""
    if data.draw(st.integers(0, 3), "how") == 0:
        return raw_bytes(data, json.dumps(content).encode())
    return json.dumps(mutated(data, content)).encode()


def raw_bytes(data: st.DataObject, content: bytes) -> bytes:
    """Cut, overwrite or lengthen somewhere."""
    at = data.draw(st.integers(0, len(content)), "at")
    what = data.draw(st.binary(max_size=9), "bytes")
    keep = data.draw(st.sampled_from([0, len(what), len(content)]), "skip")
    return content[:at] + what + content[at + keep :]


def parted(path: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file."""
    whole = path.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    return json.loads(whole[8 : 8 + length]), whole[8 + length :]


def joined(header: bytes, data: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + data


COMMANDS = pytest.mark.parametrize("command", ["finalize", "verify"])


@COMMANDS
@hostile
@given(data=st.data())
def test_headers(scene: Scene, command: str, data: st.DataObject) -> None:
    given_ = scene.source if command == "finalize" else scene.export
    folder = scene.copy(given_)
    header, tail = parted(folder / WEIGHTS)
    changed = joined(json_bytes(data, header), tail)
    (folder / WEIGHTS).write_bytes(changed)
    scene.answers(folder, command)
    (folder / MANIFEST).unlink(missing_ok=True)
    scene.answers(folder, command)


@COMMANDS
@hostile
@given(data=st.data())
def test_bytes_of_weight_files(scene: Scene, command: str, data: st.DataObject) -> None:
    folder = scene.copy(scene.source if command == "finalize" else scene.export)
    path = folder / WEIGHTS
    path.write_bytes(
        data.draw(st.binary(max_size=200), "file")
        if data.draw(st.booleans(), "replaced")
        else raw_bytes(data, path.read_bytes())
    )
    scene.answers(folder, command)


@hostile
@given(data=st.data())
def test_indexes(scene: Scene, data: st.DataObject) -> None:
    folder = scene.copy(scene.sharded)
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_bytes(json_bytes(data, index))
    scene.answers(folder, "finalize")


@COMMANDS
@hostile
@given(data=st.data())
def test_configurations(scene: Scene, command: str, data: st.DataObject) -> None:
    folder = scene.copy(scene.source if command == "finalize" else scene.export)
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_bytes(json_bytes(data, config))
    (folder / MANIFEST).unlink(missing_ok=True)
    scene.answers(folder, command)


@COMMANDS
@hostile
@given(data=st.data())
def test_manifests(scene: Scene, command: str, data: st.DataObject) -> None:
    folder = scene.copy(scene.export)
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_bytes(json_bytes(data, manifest))
    scene.answers(folder, command)


@COMMANDS
@hostile
@given(data=st.data())
def test_configurations_of_targets(
    scene: Scene, command: str, data: st.DataObject
) -> None:
    path = scene.desk.target / CONFIG
    before = path.read_bytes()
    path.write_bytes(json_bytes(data, json.loads(before)))
    folder = scene.source if command == "finalize" else scene.export
    try:
        scene.answers(folder, command)
    finally:
        path.write_bytes(before)


@pytest.mark.parametrize(
    "where, value",
    [
        ("source", 10**400),
        ("bare source", []),
        ("target", 10**400),
        ("target", []),
        ("export", 10**400),
        ("export", []),
    ],
    ids=lambda v: "huge" if isinstance(v, int) else "list" if v == [] else v,
)
def test_every_key_of_a_configuration(scene: Scene, where: str, value: Any) -> None:
    """One value at a time, everywhere: what chance may miss."""
    folder = scene.copy(scene.export if where == "export" else scene.source)
    (folder / MANIFEST).unlink(missing_ok=True)
    path = (scene.desk.target if where == "target" else folder) / CONFIG
    command = "verify" if where == "export" else "finalize"
    before = path.read_bytes()
    content = json.loads(before)
    try:
        for place in [p for p in places(content) if p]:
            changed = copy.deepcopy(content)
            parent = changed
            for key in place[:-1]:
                parent = parent[key]
            parent[place[-1]] = value
            path.write_text(json.dumps(changed))
            scene.answers(folder, command, named=where != "bare source")
    finally:
        path.write_bytes(before)


@hostile
@given(data=st.data())
def test_records_of_the_training(scene: Scene, data: st.DataObject) -> None:
    """What only describes a checkpoint never stops its export."""
    folder = scene.copy(scene.source)
    files = {
        "training_state.json": {"epoch": 1, "global_step": 9},
        "val_metrics.json": {"loss_epoch": 0.5},
        "run.yaml": {"train": {"draft": {"norm_before_residual": False}}},
        "train_command.txt": "# torch: 2.13.0\nspeculators train",
    }
    name = data.draw(st.sampled_from(sorted(files)), "file")
    (folder / name).write_bytes(json_bytes(data, files[name]))
    assert scene.answers(folder, "finalize").code == 0


def test_a_recipe_that_writes_out_to_billions(scene: Scene) -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1]"]
    for i in range(30):
        lines.append(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 8)}]")
    deep = "[" * 5_000
    for text in ("\n".join(lines), "a: &a {b: *a}", deep):
        folder = scene.copy(scene.source)
        (folder / "run.yaml").write_text(text)
        assert scene.answers(folder, "finalize").code == 0


# -------------------------------------------------------------- out of the folder
def fails(scene: Scene, folder: Path, command: str, subject: str) -> None:
    answer = scene.answers(folder, command)
    assert answer.code in (1, 2)
    assert subject in {f["subject"] for f in answer.of("error")}


@pytest.mark.parametrize("up", [f"../{SECRET}", "{root}/secret.safetensors"])
def test_an_index_that_leads_out(scene: Scene, up: str) -> None:
    name = up.format(root=scene.desk.root)
    folder = scene.copy(scene.sharded)
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    write_index(folder, weight_map | {"fc.weight": name})
    fails(scene, folder, "finalize", INDEX)
    target = scene.desk.target
    held = load_file(target / WEIGHTS)
    write_index(target, dict.fromkeys(held, name))
    try:
        fails(scene, scene.source, "finalize", INDEX)
    finally:
        (target / INDEX).unlink()


@COMMANDS
@pytest.mark.parametrize("up", [f"../{SECRET}", "{root}/secret.safetensors"])
def test_a_manifest_that_leads_out(scene: Scene, command: str, up: str) -> None:
    name = up.format(root=scene.desk.root)
    folder = scene.copy(scene.export)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"][name] = {"sha256": "0" * 64, "size": 4}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    fails(scene, folder, command, name)


@COMMANDS
@pytest.mark.parametrize("name", [WEIGHTS, CONFIG, "README.md"])
def test_a_link_that_leads_out(scene: Scene, command: str, name: str) -> None:
    folder = scene.copy(scene.export)
    (folder / name).unlink()
    (folder / name).symlink_to(scene.desk.root / SECRET)
    fails(scene, folder, command, name)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder_there(path: Path) -> None:
    path.unlink()
    path.mkdir()


def endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def link_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


@pytest.mark.timeout(20)
@COMMANDS
@pytest.mark.parametrize("name", [WEIGHTS, CONFIG, MANIFEST])
@pytest.mark.parametrize("make", [fifo, folder_there, endless, link_to_itself])
def test_files_that_are_none(
    scene: Scene, command: str, name: str, make: Callable[[Path], None]
) -> None:
    """A pipe would block and a device never end."""
    folder = scene.copy(scene.export)
    make(folder / name)
    answer = scene.answers(folder, command)
    if name != MANIFEST:  # without one, it is a folder that we did not write
        assert answer.code != 0


@pytest.mark.timeout(20)
def test_depth_and_size(scene: Scene) -> None:
    deep = b'{"a":' * 50_000
    long = b'{"num_hidden_layers": ' + b"9" * 6_000 + b"}"
    twice = b'{"weight_map": {}, "weight_map": []}'
    for content in (deep, long, twice, b"", b"\xff\xfe", b"[]", b"null"):
        for name in (CONFIG, MANIFEST, INDEX):
            folder = scene.copy(scene.export)
            (folder / name).write_bytes(content)
            for command in ("finalize", "verify"):
                assert scene.answers(folder, command).code != 0, (content[:9], name)
        folder = scene.copy(scene.source)
        (folder / CONFIG).write_bytes(content)
        assert scene.answers(folder, "finalize").code != 0
