"""Exports beside the training: what holds it up, what is skipped, what is said."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file
from speculators.train.checkpointer import SingleGPUCheckpointer

from spec_export.artifact import roles
from spec_export.findings import SpecExportError, usage_error
from spec_export.training import callback as callback_module
from spec_export.training import snapshot as snapshot_module
from spec_export.training.background import Worker
from spec_export.training.buffer import HostBuffer
from spec_export.training.hook import TrainingEvent
from spec_export.training.problems import Problems, as_findings, as_state
from tests.e2e.test_training_export import (
    Calls,
    broken,
    exporter,
    link,
    losses,
    manifest,
    names,
)
from tests.helpers.cli import spec_export
from tests.helpers.tiny import Tiny, run_training

# --- the thread


def test_jobs_are_done_in_order_and_the_thread_goes_away() -> None:
    worker, done = Worker(), []
    gate = threading.Event()
    worker.submit(lambda: (gate.wait(), done.append(1)))
    worker.submit(lambda: done.append(2))
    assert worker.busy
    assert not worker.wait(0.01)
    gate.set()
    assert worker.wait(10)
    assert done == [1, 2]
    assert not worker.busy
    deadline = time.monotonic() + 10
    while any(t.name == "spec-export" for t in threading.enumerate()):
        assert time.monotonic() < deadline
    worker.submit(lambda: done.append(3))
    assert worker.wait(10)
    assert done == [1, 2, 3]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_a_thread_that_died() -> None:
    worker = Worker()
    worker.submit(lambda: 1 // 0)
    assert worker.wait(10)
    worker.submit(lambda: None)
    assert worker.wait(10)


# --- the memory


def test_a_buffer_is_used_again_and_frozen_tensors_are_copied_once() -> None:
    frozen = torch.nn.Parameter(torch.randn(4, 3), requires_grad=False)
    live = torch.nn.Parameter(torch.randn(5))
    parameters = {"frozen": frozen, "live": live}
    values = {n: p.detach() for n, p in parameters.items()} | {"d2t": torch.arange(3)}
    buffer = HostBuffer()
    first, versions = buffer.fill(values, torch.bfloat16, parameters)
    places = {name: slot.data_ptr() for name, slot in first.items()}
    assert torch.equal(first["frozen"], frozen.bfloat16())
    assert first["d2t"].dtype is torch.int64
    assert buffer.nbytes == 12 * 2 + 5 * 2 + 3 * 8
    with torch.no_grad():
        live.add_(1)
    second, later = buffer.fill(values, torch.bfloat16, parameters)
    assert {name: slot.data_ptr() for name, slot in second.items()} == places
    assert torch.equal(second["live"], live.bfloat16())
    assert later["frozen"] == versions["frozen"]
    assert later["live"] > versions["live"]
    with torch.no_grad():
        frozen.add_(1)
    third, last = buffer.fill(values, torch.bfloat16, parameters)
    assert last["frozen"] > later["frozen"]
    assert torch.equal(third["frozen"], frozen.bfloat16())


def test_frozen_tensors_are_hashed_once_per_run(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    look = roles._look

    def counted(source: Any, name: str, *args: Any, **more: Any) -> Any:
        looked.append(name)
        return look(source, name, *args, **more)

    monkeypatch.setattr(roles, "_look", counted)
    exports = exporter(tmp_path, every={"steps": 1}, when_busy="wait")
    run_training(tiny.flags(tmp_path / "run", "--max-steps", "3"), exports)
    assert len(exports.results) == 3
    assert looked.count("fc.weight") == 3
    assert looked.count("embed_tokens.weight") == 1
    assert looked.count("lm_head.weight") == 1
    first, *_, last = (r.manifest.tensors["lm_head.weight"] for r in exports.results)
    held = load_file(exports.results[-1].folder / "model.safetensors")
    assert last.sha256 == hashlib.sha256(held["lm_head.weight"].tobytes()).hexdigest()
    assert (first.role, last.role) == ("frozen", "frozen")


# --- what holds the training up


class Slow:
    """Writing that waits until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate, self.threads = threading.Event(), []
        write = callback_module.write_export

        def slow(*args: Any) -> Any:
            self.threads.append(threading.current_thread().name)
            assert self.gate.wait(60)
            return write(*args)

        monkeypatch.setattr(callback_module, "write_export", slow)


def test_training_goes_on_while_an_export_is_written(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch)
    seen: list[list[str]] = []

    def look(event: TrainingEvent) -> None:
        if event.reason == "step" and event.global_step == 3:
            seen.append(names(tmp_path))
            slow.gate.set()

    exports = exporter(tmp_path, every={"steps": 1})
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    threads = torch.get_num_threads()
    flags = tiny.flags(tmp_path / "run", "--max-steps", "3")
    run_training(flags, exports, Calls(look))
    assert seen == [[]]  # the first was not there yet, two were skipped
    # The last weights are exported at the end, whatever was skipped before.
    assert names(tmp_path) == ["step-00000001", "step-00000003"]
    assert slow.threads == ["spec-export"] * 2
    assert link(tmp_path, "latest") == link(tmp_path, "best") == "step-00000003"
    written = manifest(tmp_path / "exports" / "step-00000003")["findings"]
    told = [f for f in written if f["code"] == "export-error"]
    assert [f["subject"] for f in told] == ["step-00000002"]
    assert told[0]["severity"] == "warning"
    assert "skipped" in told[0]["message"]
    assert handlers == [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    assert torch.get_num_threads() == threads


def test_an_export_holds_the_bytes_of_its_own_step(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written two steps later, when the live weights are others."""
    slow = Slow(monkeypatch)
    rounded: list[bytes] = []

    def look(event: TrainingEvent) -> None:
        if event.reason == "step":
            weight = event.trainer.model.fc.weight.detach().bfloat16()
            rounded.append(weight.view(torch.int16).numpy().tobytes())
            if event.global_step == 3:
                slow.gate.set()

    exports = exporter(tmp_path, every={"steps": 1})
    flags = tiny.flags(tmp_path / "run", "--max-steps", "3")
    run_training(flags, exports, Calls(look))
    for name, wanted in (("step-00000001", 0), ("step-00000003", 2)):
        held = load_file(tmp_path / "exports" / name / "model.safetensors")
        assert held["fc.weight"].tobytes() == rounded[wanted]
    assert rounded[0] != rounded[2]


def test_without_background_nothing_is_left_to_do(tiny: Tiny, tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def look(event: TrainingEvent) -> None:
        if event.reason == "step":
            seen.append(names(tmp_path))

    exports = exporter(tmp_path, every={"steps": 1}, background=False)
    flags = tiny.flags(tmp_path / "run", "--max-steps", "2")
    run_training(flags, exports, Calls(look))
    assert seen == [["step-00000001"], ["step-00000001", "step-00000002"]]


def test_saves_of_the_trainer_wait_for_the_export_before(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch)
    slow.gate.set()
    exports = exporter(tmp_path)
    flags = ("--epochs", "3", "--max-steps", "1")
    run_training(tiny.flags(tmp_path / "run", *flags), exports)
    assert len(names(tmp_path)) == 3
    assert exports.errors == []


def test_an_export_that_does_not_end_is_given_up(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch)
    monkeypatch.setattr(callback_module, "FLUSH_SECONDS", 0.3)
    exports = exporter(tmp_path)
    run_training(tiny.flags(tmp_path / "run", "--max-steps", "1"), exports)
    (problem,) = exports.errors
    assert "time for it was up" in str(problem)
    assert (tmp_path / "run" / "0" / "training_state.json").is_file()
    slow.gate.set()
    exports.close()


def test_after_one_that_was_given_up_the_next_ones_are_waited_for(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch)
    monkeypatch.setattr(callback_module, "FLUSH_SECONDS", 0.3)

    def watch(event: TrainingEvent) -> None:
        if event.reason == "step" and event.global_step == 3:
            slow.gate.set()
            monkeypatch.setattr(callback_module, "FLUSH_SECONDS", 60)
        if event.reason == "step" and event.global_step == 4:
            slow.gate.clear()
            threading.Timer(1, slow.gate.set).start()
        if event.reason == "best" and event.global_step == 4:
            raise ValueError("the training fails")

    exports = exporter(tmp_path)
    flags = tiny.flags(tmp_path / "run", "--epochs", "4", "--max-steps", "1")
    calls = (Calls(better_each_epoch), exports, Calls(watch))
    with pytest.raises(ValueError, match="the training fails"):
        run_training(flags, *calls)
    assert "step-00000004" in names(tmp_path)


# --- signals


def test_an_interrupted_export_is_bounded_and_compares_nothing(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(event: TrainingEvent) -> None:
        if event.reason == "step" and event.global_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    exports = exporter(tmp_path, compare={"positions": 32})
    run_training(tiny.flags(tmp_path / "run"), exports, Calls(interrupt))
    legs = manifest(tmp_path / "exports" / "step-00000003")["comparison"]
    assert [legs[leg]["ran"] for leg in ("cast", "layout")] == [False, False]

    slow = Slow(monkeypatch)
    monkeypatch.setattr(callback_module, "INTERRUPTED_SECONDS", 0.3)
    flags = tiny.flags(tmp_path / "run", "--no-resume-from-checkpoint", "--seed", "7")
    late = exporter(tmp_path)
    began = time.monotonic()
    run_training(flags, late, Calls(interrupt))
    assert time.monotonic() - began < 60
    assert any("time for it was up" in str(problem) for problem in late.errors)
    assert names(tmp_path) == ["step-00000003"]  # nothing half is visible
    slow.gate.set()
    late.close()


def test_the_trainers_own_save_counts_where_time_is_short(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """speculators' watchdog runs since the signal, not since that save."""
    saved: list[float] = []
    save = SingleGPUCheckpointer.save_checkpoint

    def noted(*args: Any, **more: Any) -> Any:
        saved.append(time.monotonic())
        return save(*args, **more)

    def interrupt(event: TrainingEvent) -> None:
        if event.reason == "step":
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(SingleGPUCheckpointer, "save_checkpoint", noted)
    exports = exporter(tmp_path)
    run_training(tiny.flags(tmp_path / "run"), exports, Calls(interrupt))
    assert exports._run is not None and exports._run.deadline is not None
    assert exports._run.deadline <= saved[-1] + callback_module.INTERRUPTED_SECONDS
    assert names(tmp_path) == ["step-00000001"]


def test_a_signal_while_an_export_is_handed_over_makes_no_second_one(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = Worker.submit

    def signalled(self: Worker, job: Any) -> None:
        monkeypatch.setattr(Worker, "submit", submit)
        submit(self, job)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Worker, "submit", signalled)
    exports = exporter(tmp_path, every={"steps": 2})
    run_training(tiny.flags(tmp_path / "run"), exports)
    assert (tmp_path / "run" / "interrupted").is_dir()
    assert [result.folder.name for result in exports.results] == ["step-00000002"]
    assert exports.errors == []


def test_an_export_that_is_being_written_is_finished_when_a_signal_comes(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch)

    def interrupt(event: TrainingEvent) -> None:
        if event.reason == "step" and event.global_step == 2:
            threading.Timer(0.5, slow.gate.set).start()
            os.kill(os.getpid(), signal.SIGTERM)

    exports = exporter(tmp_path, every={"steps": 2})
    run_training(tiny.flags(tmp_path / "run"), exports, Calls(interrupt))
    assert names(tmp_path) == ["step-00000002"]
    assert len(slow.threads) == 1
    assert exports.errors == []


# --- errors


def better_each_epoch(event: TrainingEvent) -> None:
    if event.reason == "start":
        validate = event.trainer.val_epoch
        event.trainer.val_epoch = lambda epoch: (
            validate(epoch) | {"loss_epoch": 9.0 - epoch}
        )


def test_a_failure_is_told_by_the_next_manifest(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = callback_module.write_export

    def fail_once(*args: Any) -> Any:
        monkeypatch.setattr(callback_module, "write_export", write)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(callback_module, "write_export", fail_once)
    exports = exporter(tmp_path)
    flags = ("--epochs", "2", "--max-steps", "1")
    falling = Calls(better_each_epoch)
    run_training(tiny.flags(tmp_path / "run", *flags), falling, exports)
    assert names(tmp_path) == ["step-00000002"]
    told = manifest(tmp_path / "exports" / "step-00000002")["findings"]
    (one,) = [f for f in told if f["code"] == "export-error"]
    assert one["subject"] == "step-00000001"
    assert "Input/output error" in one["message"]
    done = spec_export("finalize", tmp_path / "exports", "--no-compare")
    assert done.code == 0  # a later export has made it good


def test_finalize_says_no_where_the_last_export_failed(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = callback_module.write_export

    def fail_then(*args: Any) -> Any:
        monkeypatch.setattr(callback_module, "write_export", broken)
        return write(*args)

    monkeypatch.setattr(callback_module, "write_export", fail_then)
    exports = exporter(tmp_path)
    flags = ("--epochs", "2", "--max-steps", "1")
    falling = Calls(better_each_epoch)
    run_training(tiny.flags(tmp_path / "run", *flags), falling, exports)
    assert names(tmp_path) == ["step-00000001"]
    (file,) = (tmp_path / "exports").glob(".spec_export_run-*.json")
    (failure,) = json.loads(file.read_text())["failed"]
    assert failure == {"step": 2, "message": "OSError: the disk is gone", "best": True}
    done = spec_export("finalize", tmp_path / "exports", "--no-compare")
    assert done.code == 1
    assert done.finding("export-error")["subject"] == "step 2"
    assert manifest(tmp_path / "exports" / "step-00000001")["status"] == "saved"
    named = tmp_path / "exports" / "step-00000001"
    assert spec_export("finalize", named, "--no-compare").code == 0


def test_a_disk_that_was_full_for_the_best_is_not_forgotten(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor had it room for the state file then; the next export finds some again."""
    write, replace = callback_module.write_export, snapshot_module.replace_file
    full: list[bool] = []

    def refused(what: str) -> None:
        if full:
            raise usage_error("disk-full", what, "no space left on device")

    def write_export(snapshot: Any, *rest: Any) -> Any:
        full[:] = [True] * (snapshot.record.global_step == 2)
        refused("model.safetensors")
        return write(snapshot, *rest)

    def replace_file(path: Path, data: bytes) -> Any:
        refused(path.name)
        return replace(path, data)

    monkeypatch.setattr(callback_module, "write_export", write_export)
    monkeypatch.setattr(snapshot_module, "replace_file", replace_file)
    flags = tiny.flags(tmp_path / "run", "--epochs", "3", "--max-steps", "1")
    run_training(flags, losses(3, 1, 2), exporter(tmp_path))
    assert names(tmp_path) == ["step-00000001", "step-00000003"]
    assert link(tmp_path, "best") == "step-00000001"
    done = spec_export("finalize", tmp_path / "exports", "--no-compare")
    assert done.code == 1
    assert done.finding("export-error")["subject"] == "step 2"


def test_on_error_raise_in_the_background_ends_the_training_at_the_next_export(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callback_module, "write_export", broken)
    exports = exporter(tmp_path, on_error="raise", every={"steps": 1}, when_busy="wait")
    steps: list[int] = []
    watch = Calls(lambda e: e.reason == "step" and steps.append(e.global_step))
    with pytest.raises(OSError, match="the disk is gone"):
        run_training(tiny.flags(tmp_path / "run"), watch, exports)
    assert steps == [1, 2]
    assert len(exports.errors) == 1


def test_what_failed_for_the_best_weights_is_not_forgotten() -> None:
    problems = Problems()
    problems.note(2, "a")
    problems.note(3, "b")
    told = problems.open(-1)
    subjects = [f.subject for f in as_findings(told)]
    assert subjects == ["step-00000002", "step-00000003"]
    problems.made_good(told, 4)
    assert problems.open(-1) == []
    state = as_state(problems.open(2), 2)
    assert state == [{"step": 2, "message": "a", "best": True}]
    problems.note(2, "c")
    (one,) = as_state(problems.open(2), 2)  # one finding for each step
    assert one["message"] == "c"
    problems.made_good([], 2)
    assert problems.open(2) == []


def test_an_exception_counts_once() -> None:
    problems = Problems()
    one = SpecExportError([])
    assert problems.add(one, unraised=True)
    assert problems.unraised() is one
    assert not problems.add(one)
    assert problems.unraised() is None
