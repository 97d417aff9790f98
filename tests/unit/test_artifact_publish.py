"""An export becomes visible whole or not at all, also after a crash."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spec_export.artifact import hidden, publish
from spec_export.artifact.hidden import sweep
from spec_export.artifact.manifest import MANIFEST_NAME, Manifest
from spec_export.artifact.publish import (
    Staging,
    point_link,
    publish_new,
    publish_step,
    replace_existing,
    retain,
    step_name,
)
from spec_export.findings import SpecExportError

ROOT = Path(__file__).parents[2]
NAME = step_name(450)


def fill(folder: Path, content: str = "a", status="saved", run_id="r1") -> Path:
    folder.mkdir(exist_ok=True)
    digest = content.encode().hex().ljust(64, "0")
    (folder / "config.json").write_text(content)
    Manifest.model_validate(
        {
            "run_id": run_id,
            "status": status,
            "files": {"config.json": {"sha256": digest, "size": len(content)}},
            "serving": {
                "min_version": "1",
                "max_known_version": "1",
                "algorithm": "EAGLE3",
                "architecture": "X",
                "requires_plugin": False,
                "launch": [],
            },
            "tensors": {},
        }
    ).write(folder)
    return folder


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def refused(call, *args) -> str:
    with pytest.raises(SpecExportError) as caught:
        call(*args)
    assert caught.value.exit_code == 2
    return caught.value.findings[0].code


def dead_pid() -> int:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


# --- staging


def test_step_names():
    assert step_name(450) == "step-00000450"
    assert step_name(123_456_789) == "step-123456789"


def test_a_staging_folder_is_hidden_beside_its_place_and_goes_away(tmp_path):
    with Staging(tmp_path / "out", NAME) as staging:
        assert staging.path.parent == tmp_path / "out"
        assert staging.path.name.startswith(".staging-")
        fill(staging.path)
    assert names(tmp_path / "out") == []


@pytest.mark.parametrize("problem", [RuntimeError, KeyboardInterrupt])
def test_an_error_leaves_nothing(tmp_path, problem):
    with pytest.raises(problem), Staging(tmp_path, NAME) as staging:
        fill(staging.path)
        raise problem
    assert names(tmp_path) == []


def test_a_parent_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    assert refused(Staging(tmp_path / "file", NAME).__enter__) == "output-unwritable"


# --- publishing


def test_publishing(tmp_path):
    with Staging(tmp_path, NAME) as staging:
        fill(staging.path)
        assert publish_new(staging.path, tmp_path / NAME) == tmp_path / NAME
    assert names(tmp_path) == [NAME]
    assert names(tmp_path / NAME) == ["config.json", MANIFEST_NAME]


@pytest.mark.parametrize("kind", ["folder", "file", "link", "dangling"])
def test_a_taken_path_is_refused_and_untouched(tmp_path, kind):
    dest = tmp_path / "x"
    if kind == "folder":
        fill(dest, "old")
    elif kind == "file":
        dest.write_text("old")
    else:
        dest.symlink_to(fill(tmp_path / "y") if kind == "link" else "nowhere")
    with Staging(tmp_path, "x") as staging:
        fill(staging.path, "new")
        assert refused(publish_new, staging.path, dest) == "output-exists"
    if kind == "folder":
        assert (dest / "config.json").read_text() == "old"
    assert not list(tmp_path.glob(".staging*"))


def test_a_race_for_one_name_has_one_winner(tmp_path, monkeypatch):
    """The name is taken between the look and the rename."""
    dest = tmp_path / "x"
    real = os.rename

    def late(source, target):
        fill(dest, "other")
        real(source, target)

    monkeypatch.setattr(os, "rename", late)
    with Staging(tmp_path, "x") as staging:
        fill(staging.path, "mine")
        assert refused(publish_new, staging.path, dest) == "output-exists"
    assert (dest / "config.json").read_text() == "other"


def test_everything_is_on_the_disk_before_it_is_visible(tmp_path, monkeypatch):
    events = []
    real_sync, real_rename = os.fsync, os.rename

    def sync(descriptor):
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        real_sync(descriptor)

    def rename(source, target):
        events.append("rename")
        real_rename(source, target)

    with Staging(tmp_path, NAME) as staging:
        fill(staging.path)
        monkeypatch.setattr(os, "fsync", sync)
        monkeypatch.setattr(os, "rename", rename)
        publish_new(staging.path, tmp_path / NAME)
        at = events.index("rename")
        assert set(events[: at - 1]) == {"config.json", MANIFEST_NAME}
        assert events[at - 1] == staging.path.name
        assert events[at + 1 :] == [tmp_path.name]


def step(parent: Path, content: str, *, failed=False, **more) -> Path:
    with Staging(parent, NAME) as staging:
        fill(staging.path, content, **more)
        return publish_step(staging.path, parent, NAME, failed=failed)


def test_a_name_is_never_used_again(tmp_path):
    assert step(tmp_path, "a").name == NAME
    assert step(tmp_path, "b").name == f"{NAME}.2"
    assert step(tmp_path, "c").name == f"{NAME}.3"
    assert (tmp_path / NAME / "config.json").read_text() == "a"


def test_the_same_bytes_are_the_same_export(tmp_path):
    step(tmp_path, "a")
    step(tmp_path, "b")
    assert step(tmp_path, "a", run_id="r2").name == NAME
    assert step(tmp_path, "b").name == f"{NAME}.2"
    assert names(tmp_path) == [NAME, f"{NAME}.2"]


def test_a_failed_one_says_so(tmp_path):
    assert step(tmp_path, "a", failed=True).name == f"{NAME}.failed"
    assert step(tmp_path, "a", failed=True).name == f"{NAME}.failed"
    assert step(tmp_path, "b").name == f"{NAME}.2"
    assert step(tmp_path, "c", failed=True).name == f"{NAME}.3.failed"


def test_a_folder_without_a_manifest_takes_its_name(tmp_path):
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "x").write_text("")
    assert step(tmp_path, "a").name == f"{NAME}.2"


# --- replacing


@pytest.mark.parametrize("exchange", [True, False])
def test_the_new_one_takes_the_place_of_the_old_one(tmp_path, monkeypatch, exchange):
    if not exchange:
        monkeypatch.setattr(publish, "_exchange", lambda *_: False)
    dest = fill(tmp_path / "x", "old")
    (dest / "model-00001-of-00002.safetensors").write_text("left over")
    with Staging(tmp_path, "x") as staging:
        fill(staging.path, "new")
        assert replace_existing(staging.path, dest) == dest
    assert names(tmp_path) == ["x"]
    assert names(dest) == ["config.json", MANIFEST_NAME]
    assert (dest / "config.json").read_text() == "new"


def test_names_are_exchanged_in_one_step_here(tmp_path):
    a, b = fill(tmp_path / "a", "a"), fill(tmp_path / "b", "b")
    assert publish._exchange(a, b)
    assert (a / "config.json").read_text() == "b"
    assert not publish._exchange(a, tmp_path / "absent")


def test_a_replacement_that_fails_leaves_the_old_one(tmp_path, monkeypatch):
    monkeypatch.setattr(publish, "_exchange", lambda *_: False)
    dest = fill(tmp_path / "x", "old")
    real = os.rename

    def rename(source, target):
        if Path(source).name.startswith(".staging"):
            raise OSError(28, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with Staging(tmp_path, "x") as staging:
        fill(staging.path, "new")
        assert refused(replace_existing, staging.path, dest) == "disk-full"
    assert (dest / "config.json").read_text() == "old"
    assert names(tmp_path) == ["x"]


def test_a_link_is_followed(tmp_path):
    fill(tmp_path / NAME, "old")
    (tmp_path / "latest").symlink_to(NAME)
    with Staging(tmp_path, "x") as staging:
        fill(staging.path, "new")
        assert replace_existing(staging.path, tmp_path / "latest").name == NAME
    assert (tmp_path / "latest").is_symlink()
    assert (tmp_path / "latest" / "config.json").read_text() == "new"


@pytest.mark.parametrize("stranger", ["thesis.docx", "src/", ".git/", "id_rsa"])
def test_force_deletes_no_more_than_a_model(tmp_path, stranger):
    dest = fill(tmp_path / "x", "old")
    (dest / "probe").mkdir()
    if stranger.endswith("/"):
        (dest / stranger).mkdir()
    else:
        (dest / stranger).write_text("x")
    with Staging(tmp_path, "x") as staging:
        fill(staging.path, "new")
        assert refused(replace_existing, staging.path, dest) == "output-exists"
    assert (dest / stranger).exists()


@pytest.mark.parametrize("kind", ["absent", "empty"])
def test_nothing_to_replace(tmp_path, kind):
    dest = tmp_path / "x"
    if kind == "empty":
        dest.mkdir()
    with Staging(tmp_path, "x") as staging:
        fill(staging.path, "new")
        replace_existing(staging.path, dest)
    assert (dest / "config.json").read_text() == "new"


# --- links


def test_links_are_relative_and_move_in_one_step(tmp_path, monkeypatch):
    fill(tmp_path / "a")
    fill(tmp_path / "b")
    link = tmp_path / "latest"
    point_link(link, "a")
    point_link(link, "a")
    assert os.readlink(link) == "a"
    seen = []
    real = os.replace

    def replace(source, target):
        seen.append(os.readlink(target))  # the old link is there until the end
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    point_link(link, "b")
    assert (seen, os.readlink(link)) == (["a"], "b")
    assert names(tmp_path) == ["a", "b", "latest"]


def test_a_real_folder_is_not_made_a_link(tmp_path):
    fill(tmp_path / "best")
    assert refused(point_link, tmp_path / "best", "x") == "output-exists"
    assert (tmp_path / "best" / "config.json").exists()


# --- retention


def aged(parent: Path, name: str, age: int, **more) -> Path:
    folder = fill(parent / name, name, **more)
    when = time.time() - age
    os.utime(folder / MANIFEST_NAME, (when, when))
    return folder


def test_the_newest_best_latest_and_final_ones_stay(tmp_path):
    aged(tmp_path, "step-00000001", 90, status="final")
    aged(tmp_path, "step-00000002", 80)
    aged(tmp_path, "step-00000003", 70)
    aged(tmp_path, "step-00000004.failed", 65, status="failed")
    aged(tmp_path, "step-00000004", 60)
    aged(tmp_path, "step-00000005.failed", 55, status="failed")
    aged(tmp_path, "step-00000005", 50)
    aged(tmp_path, "step-00000006", 40)
    (tmp_path / "step-00000000").mkdir()
    (tmp_path / "mine").mkdir()
    point_link(tmp_path / "best", "step-00000003")
    point_link(tmp_path / "latest", "step-00000006")
    assert retain(tmp_path, None) == []
    removed = {p.name for p in retain(tmp_path, 2)}
    assert removed == {
        "step-00000002",
        "step-00000004",
        "step-00000004.failed",
        "step-00000005.failed",
    }
    assert names(tmp_path) == [
        "best",
        "latest",
        "mine",
        "step-00000000",
        "step-00000001",
        "step-00000003",
        "step-00000005",
        "step-00000006",
    ]
    assert retain(tmp_path, 2) == []


def test_age_counts_and_not_the_step(tmp_path):
    """A second run in the same folder starts again at step 1."""
    aged(tmp_path, "step-00009000", 90, run_id="old")
    aged(tmp_path, "step-00000001", 10, run_id="new")
    aged(tmp_path, "step-00000002", 5, run_id="new")
    assert [p.name for p in retain(tmp_path, 1, "new")] == ["step-00000001"]
    assert [p.name for p in retain(tmp_path, 1)] == ["step-00009000"]


# --- what crashes leave


def leftover(parent: Path, prefix: str, name: str, pid: int, machine=None) -> Path:
    machine = machine or hidden._machine()
    return fill(parent / f"{prefix}{name}-{machine}-{pid}-0123abcd")


def test_leftovers_of_dead_processes_are_swept(tmp_path):
    dead = dead_pid()
    leftover(tmp_path, ".staging-", NAME, dead)
    leftover(tmp_path, ".trash-", NAME, dead)
    mine = leftover(tmp_path, ".staging-", NAME, os.getpid())
    parent = leftover(tmp_path, ".staging-", NAME, os.getppid())
    elsewhere = leftover(tmp_path, ".staging-", NAME, dead, "0" * 12)
    old = leftover(tmp_path, ".staging-", NAME, dead, "1" * 12)
    week_ago = time.time() - 8 * 24 * 3600
    os.utime(old, (week_ago, week_ago))
    (tmp_path / ".staging-of-someone-else").mkdir()
    state = f".tmp-state.json-{hidden._machine()}-{dead}-0123abcd"
    link = f".tmp-latest-{hidden._machine()}-{dead}-0123abcd"
    (tmp_path / state).write_text("{}")
    (tmp_path / link).symlink_to("nowhere")
    assert len(sweep(tmp_path)) == 5
    assert names(tmp_path) == sorted(
        [mine.name, parent.name, elsewhere.name, ".staging-of-someone-else"]
    )


def test_an_old_export_gets_its_name_back(tmp_path):
    leftover(tmp_path, ".old-", "x", dead_pid())
    sweep(tmp_path)
    assert names(tmp_path) == ["x"]
    leftover(tmp_path, ".old-", "x", dead_pid())
    sweep(tmp_path)
    assert names(tmp_path) == ["x"]


CRASH = """
import os, signal, sys
from pathlib import Path
from spec_export.artifact import hidden, publish
sys.path.insert(0, {tests!r})
from test_artifact_publish import fill
calls = 0
at = int(sys.argv[2])
def deadly(function):
    def call(*args, **kwargs):
        global calls
        calls += 1
        if calls == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return call
for name in ("fsync", "rename", "replace", "symlink", "mkdir", "open"):
    setattr(os, name, deadly(getattr(os, name)))
if sys.argv[3] == "two":
    publish._exchange = lambda *_: False
else:
    publish._exchange = deadly(publish._exchange)
parent = Path(sys.argv[1])
with publish.Staging(parent, "x") as staging:
    fill(staging.path, "new")
    publish.replace_existing(staging.path, parent / "x")
    publish.point_link(parent / "latest", "x")
"""


@pytest.mark.parametrize("exchange", ["one", "two"])
def test_killed_anywhere_a_reader_sees_the_old_or_the_new(tmp_path, exchange):
    """Each system call of a replacement is the last one once."""
    outcomes = []
    for at in range(1, 60):
        parent = tmp_path / f"{exchange}-{at}"
        parent.mkdir()
        fill(parent / "x", "old")
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                CRASH.format(tests=str(Path(__file__).parent)),
                *(str(parent), str(at), exchange),
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        sweep(parent)
        found = (parent / "x" / "config.json").read_text()
        outcomes.append(found)
        assert found in ("old", "new")
        assert Manifest.read(parent / "x").status == "saved"
        assert not list(parent.glob(".staging*"))
        assert not list(parent.glob(".old*"))
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
    assert outcomes[0] == "old"
    assert outcomes[-1] == "new"
    assert outcomes == sorted(outcomes, reverse=True)  # once new, never old again
    assert len(outcomes) > 8
