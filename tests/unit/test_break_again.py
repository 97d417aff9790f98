"""Attempts to break what runs beside a training, and what runs after it."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic_core import PydanticSerializationError
from speculators.config import SpeculatorModelConfig
from speculators.train.graceful_shutdown import TrainingInterruptedError
from torch.utils.data import DataLoader

from spec_export import read_manifest
from spec_export.artifact import finish
from spec_export.artifact import verify_files as verify_module
from spec_export.artifact.manifest import FileEntry
from spec_export.artifact.verify_files import verify_files
from spec_export.findings import Severity, SpecExportError
from spec_export.judge import Inputs, not_run
from spec_export.judge.engine import host
from spec_export.report.card import CARD_NAME
from spec_export.training import compare, ranks
from spec_export.training.batches import KEPT_ROWS, KeptBatch
from spec_export.training.draft_config import checkpoint_config
from spec_export.training.hook import hook_trainer
from spec_export.training.launchers import join_launcher
from tests.helpers import field
from tests.helpers.cli import spec_export
from tests.helpers.tiny import REPOSITORY

# --- loaders


def a_batch(document: int = 0, rows: int = 8) -> dict[str, torch.Tensor]:
    ids = torch.full((1, rows), document)
    return {
        "hidden_states": torch.randn(1, rows, 6),
        "input_ids": torch.arange(rows)[None],
        "document_ids": ids,
    }


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Batches that a worker can make."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return a_batch(index, 2 * KEPT_ROWS)


def a_loader(**more: Any) -> Any:
    return DataLoader(Rows(), batch_size=None, **more)


def test_a_watched_loader_is_its_loader_to_everybody_else() -> None:
    kept, loader = KeptBatch(), a_loader()
    watched = kept.watched("training", loader)
    assert isinstance(watched, DataLoader) and len(watched) == 4
    assert watched.dataset is loader.dataset and watched.sampler is loader.sampler
    watched.marked = 3
    assert loader.marked == 3
    for made in (
        copy.copy(watched),
        copy.deepcopy(watched),
        pickle.loads(pickle.dumps(watched)),
    ):
        assert type(made) is DataLoader and made.marked == 3
        assert len(list(made)) == 4
    twice: Any = KeptBatch().watched("training", watched)  # by two callers of attach
    assert isinstance(twice, DataLoader) and twice.marked == 3
    assert type(copy.copy(twice)) is DataLoader
    with pytest.raises(AttributeError):
        watched.dataset_of_nobody  # noqa: B018


def test_workers_that_persist_give_each_batch_in_each_epoch() -> None:
    kept = KeptBatch()
    loader = a_loader(
        num_workers=1, persistent_workers=True, multiprocessing_context="fork"
    )
    watched = kept.watched("training", loader)
    for _ in range(2):
        found = [int(batch["document_ids"][0, 0]) for batch in watched]
        assert found == [0, 1, 2, 3]
    stopped = iter(watched)  # as by --max-steps
    next(stopped)
    del stopped
    assert len(list(watched)) == 4
    assert kept.batch is not None and kept.batch.tensors["input_ids"].shape[1] == 256
    # Of its own memory, not of the worker's.
    held = kept.batch.tensors["hidden_states"]
    assert held.untyped_storage().nbytes() == 256 * 6 * 2


def test_a_loader_that_breaks_off_or_never_ends_or_gives_anything() -> None:
    kept = KeptBatch()
    given: list[Any] = [None, 3, {}, {"document_ids": "?"}, a_batch(-1), a_batch()]

    def broken() -> Iterator[Any]:
        yield from given
        raise RuntimeError("a worker died")

    watched, seen = kept.watched("training", broken()), []
    with pytest.raises(RuntimeError, match="a worker died"):
        for batch in watched:
            seen.append(batch)
    assert all(one is other for one, other in zip(seen, given, strict=True))
    assert kept.batch is not None  # the last one is of use

    def endless() -> Iterator[Any]:
        while True:
            yield given[-1]

    first = kept.batch
    batches = iter(KeptBatch().watched("training", endless()))
    assert [next(batches) for _ in range(3)] == [given[-1]] * 3
    assert list(kept.watched("training", [a_batch()])) and kept.batch is first
    assert list(kept.watched("validation", [a_batch()]))
    assert kept.batch.kind == "validation"


class OwnTrainer:
    """A trainer whose loader for validation is computed."""

    def __init__(self) -> None:
        self.checkpointer = SimpleNamespace(
            path=Path("."),
            previous_epoch=-1,
            save_checkpoint=lambda: None,
            update_best_symlink=lambda: None,
        )
        self.config = self.model = self.optimizers = None
        self.global_step, self.resume_from_checkpoint = 0, False
        self.train_loader: Any = [a_batch()]

    @property
    def val_loader(self) -> Any:
        return [a_batch()]

    def train_epoch(self, epoch: int, *, step_callback: Any = None) -> None:
        for _ in self.train_loader:
            step_callback()

    def maybe_save_checkpoint(self, epoch: int, local_step: int = 0) -> None: ...

    def maybe_update_best(self, epoch: int, metrics: Any) -> None: ...

    def run_training(self) -> None:
        self.train_epoch(0)


def test_a_loader_that_cannot_be_replaced_costs_nothing_but_its_rows() -> None:
    trainer = OwnTrainer()
    loader = trainer.train_loader
    events: list[Any] = []
    handle = hook_trainer(trainer, events.append)
    trainer.run_training()
    assert [e.reason for e in events] == ["start", "step", "end"]
    assert events[1].batch.kind == "training"
    handle.remove()
    assert trainer.train_loader is loader
    assert "run_training" not in vars(trainer)


def test_a_loader_that_the_trainer_replaces_stays() -> None:
    trainer = OwnTrainer()
    handle = hook_trainer(trainer, lambda event: None)
    trainer.train_loader = another = [a_batch()] * 2
    trainer.run_training()
    handle.remove()
    assert trainer.train_loader is another


# --- memory


def test_a_comparison_takes_no_memory_that_the_training_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside the training, on its GPU: that one ends if there is none left."""
    found = not_run("layout", "a stand-in")
    free = {"bytes": 0}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free["bytes"], 0))
    monkeypatch.setattr(compare, "_own_stream", lambda device: nullcontext())
    monkeypatch.setattr(compare, "_layout", lambda *given: found)
    draft = torch.nn.Linear(10, 10, bias=False)
    cast = not_run("cast", "a stand-in")
    inputs = Inputs.random(vocab_size=8, aux_width=4)
    for device, enough, said in (
        ("cuda", 100 * 16 - 1, "too little memory"),
        ("cuda", 100 * 16, "a stand-in"),
        ("cpu", 0, "a stand-in"),
    ):
        free["bytes"] = enough
        kept: Any = compare.Cast(cast, inputs, torch.device(device))
        nothing: Any = None
        judge = compare.live_judge(
            kept, draft, nothing, nothing, nothing, lambda: False
        )
        assert said in judge(Path("."))["layout"].reason


# --- signals and ranks


class Ranks:
    """One of two processes, as ``torch.distributed`` shows it."""

    def __init__(self, rank: int, within: Callable[[list[Any]], None]) -> None:
        self.is_available = self.is_initialized = lambda: True
        self.get_world_size, self.get_rank = lambda: 2, lambda: rank
        self.within = within

    def broadcast_object_list(self, objects: list[Any], src: int) -> None:
        self.within(objects)


@pytest.fixture
def interrupting() -> Iterator[Any]:
    """SIGTERM raises, as in a training; SIGINT ends the process at once."""

    def handler(number: int, frame: Any) -> None:
        raise TrainingInterruptedError(str(number))

    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    signal.signal(signal.SIGTERM, handler)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    yield handler
    for number, old in zip(numbers, before, strict=True):
        signal.signal(number, old)


def test_a_signal_waits_for_the_end_of_a_broadcast(
    monkeypatch: pytest.MonkeyPatch, interrupting: Any
) -> None:
    sent: list[Any] = []

    def within(objects: list[Any]) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)  # where a handler would run
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
        sent.append(objects)

    monkeypatch.setattr(ranks, "dist", Ranks(0, within))
    for act in (lambda: ranks.shared(1), lambda: ranks.on_rank0(lambda: 1)):
        with pytest.raises(TrainingInterruptedError, match="15"):
            act()
        assert signal.getsignal(signal.SIGTERM) is interrupting
    assert sent == [[1], [None, None]]


def test_a_signal_inside_a_configuration_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, interrupting: Any
) -> None:
    """pydantic would turn it into a failed export, and the training would go on."""
    config = SpeculatorModelConfig.from_dict(field.draft_config(None))
    layers = config.transformer_layer_config
    expected, real = checkpoint_config(config, "bfloat16"), layers.to_diff_dict

    def signalled() -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)  # where a handler runs
        return real()

    monkeypatch.setattr(layers, "to_diff_dict", signalled)
    with pytest.raises(PydanticSerializationError):
        config.to_json_string()
    with pytest.raises(TrainingInterruptedError, match="15"):
        checkpoint_config(config, "bfloat16")
    assert signal.getsignal(signal.SIGTERM) is interrupting
    monkeypatch.undo()
    assert checkpoint_config(config, "bfloat16") == expected


def test_ranks_hear_of_the_signal_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else they would wait for it while it saves, and it for them."""
    mail: list[Any] = []

    def act() -> None:
        raise TrainingInterruptedError("SIGTERM")

    monkeypatch.setattr(ranks, "SIGNAL_SECONDS", 0.0)
    monkeypatch.setattr(ranks, "dist", Ranks(0, lambda objects: mail.extend(objects)))
    with pytest.raises(TrainingInterruptedError, match="SIGTERM"):
        ranks.on_rank0(act)

    def receive(objects: list[Any]) -> None:
        objects[:] = mail

    monkeypatch.setattr(ranks, "dist", Ranks(1, receive))
    with pytest.raises(TrainingInterruptedError, match="rank 0 was interrupted"):
        ranks.on_rank0(act)


# --- who started this process

PMI = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}
OMPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}
PLACE = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("mpi", [PMI, OMPI])
def test_processes_of_mpi_that_nobody_brings_together_train_alone(
    mpi: dict[str, str],
) -> None:
    environ = dict(mpi)
    (told,) = join_launcher(environ, sharded=False)
    assert environ == mpi
    assert told.severity is Severity.WARNING and "trains alone" in told.message
    joined = mpi | PLACE
    assert join_launcher(joined, sharded=False) == []
    assert joined["WORLD_SIZE"] == next(v for k, v in mpi.items() if "SIZE" in k)


def test_ranks_of_two_launchers_are_not_mixed() -> None:
    alone = {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0"}
    environ = {**alone, "OMPI_COMM_WORLD_SIZE": "8", **PLACE}  # half of another's
    before = dict(environ)
    assert join_launcher(environ, sharded=False) == []
    assert environ == before
    environ = {**alone, **OMPI, **PLACE}
    assert join_launcher(environ, sharded=False) == []
    assert [environ[k] for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK")] == ["2", "8", "0"]


def test_one_process_of_accelerate_is_told_how_to_be_one() -> None:
    with pytest.raises(SpecExportError) as caught:
        join_launcher({"ACCELERATE_USE_CPU": "False", **PLACE}, sharded=False)
    assert "unset MASTER_ADDR" in (caught.value.findings[0].hint or "")
    assert join_launcher({"ACCELERATE_USE_CPU": "False"}, sharded=False) == []
    assert join_launcher(dict(PLACE), sharded=False) == []


# --- the engine's processes


def gone(pid: int) -> bool:
    """Whether a process ends within some seconds."""
    stat = Path(f"/proc/{pid}/stat")
    for _ in range(100):
        try:
            if stat.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.1)
    return False


ASKER = """
import signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup would be inherited
from pathlib import Path
from spec_export.judge import Inputs, not_run
from spec_export.judge.engine import host
host.ask(Path(sys.executable), Path(sys.argv[1]), {}, Path(sys.argv[2]), 60)
"""
ASKED = """
import runpy, subprocess, sys, time
runpy.run_path({process!r})["end_with_asker"]()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
with open({pids!r} + "~", "w") as file:
    file.write(f"{{__import__('os').getpid()}} {{child.pid}}")
__import__("os").rename({pids!r} + "~", {pids!r})
time.sleep(60)
"""


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGHUP, signal.SIGKILL], ids=lambda n: n.name
)
def test_nothing_is_left_of_an_engine_whose_finalize_is_ended(
    tmp_path: Path, number: signal.Signals
) -> None:
    pids, asked = tmp_path / "pids", tmp_path / "asked.py"
    asked.write_text(ASKED.format(process=str(host.PROCESS), pids=str(pids)))
    asker = subprocess.Popen(
        [sys.executable, "-c", ASKER, str(asked), str(tmp_path)],
        cwd=REPOSITORY,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(300):
            if pids.exists():
                break
            time.sleep(0.1)
        started = [int(pid) for pid in pids.read_text().split()]
        assert all(Path(f"/proc/{pid}").exists() for pid in started)
        asker.send_signal(number)
        assert all(gone(pid) for pid in started)
    finally:
        asker.kill()
        asker.wait()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return field.make_draft(tmp_path / "E0", field.make_target(tmp_path / "T0"))


def test_whatever_the_variable_names_costs_no_export(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder, a file, a program that answers nothing, and a full disk for it."""
    out, temporary = tmp_path / "out", tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexit 3\n")
    silent.chmod(0o755)
    for number, (named, said) in enumerate(
        [
            (tmp_path, "cannot be run"),
            (checkpoint / "config.json", "cannot be run"),
            (Path("/dev/null"), "cannot be run"),
            (silent, "exit status 3"),
            (Path(sys.executable), "PackageNotFoundError"),
        ]
    ):
        monkeypatch.setenv(host.PYTHON_VARIABLE, str(named))
        ran = spec_export("finalize", *([out] if number else [checkpoint, "-o", out]))
        assert (ran.code, ran.data["verdict"]) == (0, "pass"), ran.data
        assert said in ran.finding("comparison-not-run")["message"]
        assert list(temporary.iterdir()) == []
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    ran = spec_export("finalize", out)
    assert ran.code == 0, ran.data
    assert "No such file" in ran.finding("comparison-not-run")["message"]
    assert spec_export("verify", out).code == 0


# --- finishing in place


def test_a_card_written_by_hand_is_not_replaced(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, copied = tmp_path / "out", tmp_path / "copied"
    saved = ("finalize", checkpoint, "--output", out, "--no-compare")
    assert spec_export(*saved).code == 0
    card, listed = out / CARD_NAME, out / "spec_export_manifest.json"
    ours = card.read_bytes()
    manifest = read_manifest(str(out))
    del manifest.files[CARD_NAME]
    listed.write_bytes(manifest.to_bytes())  # as the callback leaves it

    card.write_text("# By hand\n")
    ran = spec_export("finalize", out, "--no-compare")
    assert (ran.code, ran.codes("error")) == (2, ["output-exists"])
    assert ran.finding("output-exists")["subject"] == CARD_NAME
    assert card.read_text() == "# By hand\n"
    assert spec_export("finalize", out, "-o", copied, "--no-compare").code == 0
    card.unlink()
    card.mkdir()
    assert spec_export("finalize", out, "--no-compare").code == 2
    card.rmdir()
    os.mkfifo(card)  # reading it would not end
    assert spec_export("finalize", out, "--no-compare").code == 2
    card.unlink()

    card.write_bytes(ours)  # what a finalize left that was killed
    assert spec_export("finalize", out, "--no-compare").code == 0
    assert spec_export("verify", out).code == 0
    (out / "notes").mkdir()  # other people's things lie beside it
    (out / "notes" / "mine.txt").write_text("mine")
    assert spec_export("finalize", out, "--no-compare").code == 0
    assert (out / "notes" / "mine.txt").read_text() == "mine"


def test_two_at_once_leave_one_card_and_its_manifest(
    export: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one waits between the card of the first and its manifest."""
    first, second = read_manifest(str(export)), read_manifest(str(export))
    replace, order = finish.replace_file, list[str]()
    met = threading.Event()

    def slow(path: Path, data: bytes) -> Any:
        order.append(threading.current_thread().name)
        fact = replace(path, data)
        met.set()
        time.sleep(0.05)
        return fact

    monkeypatch.setattr(finish, "replace_file", slow)
    write = finish.finish_in_place
    one = threading.Thread(
        target=write, args=(export, first, CARD_NAME, b"1"), name="one"
    )
    two = threading.Thread(
        target=write, args=(export, second, CARD_NAME, b"22"), name="two"
    )
    one.start()
    assert met.wait(10)
    two.start()
    one.join()
    two.join()
    assert order == ["one"] * 3 + ["two"] * 3
    assert verify_files(export, read_manifest(str(export))) == []


# --- many files at a time


@pytest.fixture
def export(checkpoint: Path, tmp_path: Path) -> Path:
    out = tmp_path / "export"
    done = spec_export("finalize", checkpoint, "--output", out, "--no-compare")
    assert done.code == 0
    return out


def test_what_is_no_file_is_named_and_not_waited_for(export: Path) -> None:
    manifest = read_manifest(str(export))
    os.mkfifo(export / "pipe.txt")
    (export / "device.txt").symlink_to("/dev/zero")
    (export / "loop.txt").symlink_to("loop.txt")
    (export / "folder.txt").mkdir()
    (export / "far.txt").symlink_to("/etc/hostname")
    bad = ["device.txt", "far.txt", "folder.txt", "loop.txt", "pipe.txt"]
    assert verify_files(export, manifest) == []  # nobody lists them
    for name in bad:
        manifest.files[name] = FileEntry(sha256="0" * 64, size=0)
    found = {f.subject: f.code for f in verify_files(export, manifest)}
    assert sorted(found) == bad
    assert found["far.txt"] == "path-escape"
    assert {found[name] for name in bad if name != "far.txt"} == {"file-missing"}


def test_a_file_that_becomes_a_pipe_or_cannot_be_read_is_named(
    export: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at its size and the reading; and a disk that fails."""
    manifest = read_manifest(str(export))
    real = verify_module.hash_file

    def swapped(path: Path, stop: threading.Event) -> Any:
        if path.name == CARD_NAME:
            path.unlink()
            os.mkfifo(path)
        if path.name == "config.json":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, stop)

    monkeypatch.setattr(verify_module, "hash_file", swapped)
    found = verify_files(export, manifest)
    assert [(f.code, f.subject) for f in found] == [
        ("file-corrupt", CARD_NAME),
        ("file-corrupt", "config.json"),
    ]


def test_ten_thousand_files(export: Path) -> None:
    manifest = read_manifest(str(export))
    (export / "many").mkdir()
    empty = FileEntry(
        sha256="e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        size=0,
    )
    for number in range(10_000):
        name = f"many/{number:05d}"
        (export / name).touch()
        manifest.files[name] = empty
    (export / "many" / "04711").write_text("x")
    began = time.monotonic()
    (found,) = verify_files(export, manifest)
    assert (found.code, found.subject) == ("file-changed", "many/04711")
    assert time.monotonic() - began < 30
    assert len(os.listdir("/proc/self/fd")) < 200


VERIFY = """
import json, os, signal, sys, threading, time
from spec_export import cli
from spec_export.artifact import verify_files as v

real = v.hash_file
def slow(path, stop):
    if path.name.endswith(".safetensors"):
        time.sleep(0.5)  # all threads have started
        os.kill(os.getpid(), signal.SIGINT)
        while not stop():
            time.sleep(0.01)
    return real(path, stop)

v.hash_file = slow
sys.exit(cli.run(["verify", sys.argv[1], "--files-only", "--json"]))
"""


def test_ctrl_c_waits_for_no_file_s_end(export: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", VERIFY, str(export)],
        cwd=REPOSITORY,
        capture_output=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 128 + signal.SIGINT, done.stderr
    assert b"Traceback" not in done.stderr
    assert spec_export("verify", export, "--files-only").code == 0


LOCKED = """
import signal, sys, threading, time
from types import SimpleNamespace
import numpy as np
from spec_export import cli
from spec_export.artifact import verify_files, writer

enter, main = threading.Condition.__enter__, threading.get_ident()
act, path, number = sys.argv[1], sys.argv[2], [int(sys.argv[3])]

def entered(self):
    enter(self)
    here = sys._getframe(1)
    if number and threading.get_ident() == main and here.f_code.co_name == "result":
        signal.raise_signal(number.pop())  # before the with knows that it has entered

def late(*arguments):
    while number:
        time.sleep(0.01)
    return real(*arguments)

threading.Condition.__enter__ = entered
signal.signal(number[0], cli._on_signal)
if act == "verify":
    real, verify_files.hash_file = verify_files.hash_file, late
    sys.exit(cli.run(["verify", path, "--files-only"]))
digest = writer.hashlib.sha256()
real = digest.update
writer.hashlib = SimpleNamespace(sha256=lambda: SimpleNamespace(update=late))
entry = writer.Entry("w", "F32", (4,), lambda: np.zeros(4, np.float32))
writer.write_safetensors(path + "/new.safetensors", [entry])
"""


@pytest.mark.parametrize("act", ["verify", "write"])
@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name
)
def test_a_signal_locks_nobody_out(
    export: Path, number: signal.Signals, act: str
) -> None:
    """One that comes when the main thread holds what the others need."""
    done = subprocess.run(
        [sys.executable, "-c", LOCKED, act, str(export), str(int(number))],
        cwd=REPOSITORY,
        capture_output=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stderr) == (128 + number, b"")
