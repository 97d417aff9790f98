"""What the callback's thread does for one export, and ``finalize`` for a final one.

As a program, which has no torch, it reads trials from its standard input, one JSON
object a line, forks a process for each, lets that be killed or fail, and answers what
is left.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import time
import traceback
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from spec_export import export
from spec_export import finalize as finishing
from spec_export.artifact import publish
from spec_export.artifact.disk import replace_file, write_file
from spec_export.artifact.manifest import FileEntry, Manifest
from spec_export.artifact.publish import settle, step_name
from spec_export.artifact.resolve import step_folders
from spec_export.artifact.runs import state_path
from spec_export.artifact.source import CheckpointSource
from spec_export.artifact.target import open_target
from spec_export.export import ExportOptions, export_source
from spec_export.finalize import FinalizeOptions, finalize
from spec_export.findings import SpecExportError, has_errors
from spec_export.report.card import CARD_NAME
from spec_export.serving.verify import verify
from tests.faults.shim import Shim

REFUSED, CRASHED = 3, 4
OLD_CARD = b"What was said of it before: exported for\nSGLang by spec-export.\n"


def export_once(source: Path, target: Path, output_dir: Path, step: int) -> None:
    """The same calls as ``SGLangExport._write``; keeps the newest export only."""
    opened = CheckpointSource.open(source)
    opened.record.run_id, opened.record.global_step = "run", step
    replace_file(state_path(output_dir, "0" * 16), b'{"run_id": "run"}')
    result = export_source(
        opened,
        open_target(target),
        ExportOptions(),
        output_dir / step_name(step),
        place="step",
    )
    settle(output_dir, result.folder, best=result.folder, keep_last=1, run_id="run")


def finalize_once(act: str, source: Path, target: Path, root: Path) -> None:
    """``finalize --no-compare``, of what ``finals`` lays out and of a checkpoint.

    Args:
        act: ``finish`` or ``again``: in place, what is saved or what was final before;
            ``copy`` or ``replace``: onto what was final before, the saved one or the
            checkpoint; ``exchange``: that, where names cannot be exchanged; ``new``:
            beside them, the checkpoint.
        source: The checkpoint.
        target: Its target.
        root: The folder of ``finals``.
    """
    options = FinalizeOptions(target=target, compare=False)
    if act == "exchange":
        publish._exchange = lambda _first, _second: False
    if act in ("finish", "again"):
        finalize(root / ("saved" if act == "finish" else "final"), options)
        return
    output = root / ("new" if act == "new" else "final")
    options = replace(options, output=output, force=act != "new")
    finalize(root / "saved" if act == "copy" else source, options)


def finals(old: Path, new: Path, target: Path, root: Path) -> None:
    """Lay out a saved export, and a final one whose card is that of another time."""
    options = ExportOptions()
    for name, checkpoint in (("saved", new), ("final", old)):
        source = CheckpointSource.open(checkpoint)
        place = root / name
        export_source(source, open_target(target), options, place, place="new")
    finalize_once("again", new, target, root)
    final = root / "final"
    card = write_file(final / CARD_NAME, OLD_CARD)
    manifest = Manifest.read(final)
    manifest.files[CARD_NAME] = FileEntry(sha256=card.sha256, size=card.size)
    manifest.write(final)


@dataclass
class Trial:
    """One export that something happens to.

    Attributes:
        source, target: What is exported.
        output_dir: Where to, with an export or two in it.
        act: ``export``, or one of ``finalize_once``.
        at, mode, errno: As ``Shim``.
        limit: RLIMIT_FSIZE in bytes.
        umask: Of the process.
        user: Whose rights it has.
        clock: Seconds that the clock is set back by.
        log: Write the calls to a file beside the output_dir.
        refill: Remove ``ballast`` beside the output_dir before training goes on.
        broken: Publish as if there were no protocol: the control of all trials.
        said: What the process answered, if it lived.
    """

    source: str
    target: str
    output_dir: str
    act: str = "export"
    at: int = 0
    mode: str = "before"
    errno: int = 0
    limit: int | None = None
    umask: int | None = None
    user: int | None = None
    clock: float = 0.0
    step: int = 3
    log: bool = False
    refill: bool = False
    broken: bool = False
    said: str = ""

    @property
    def changed(self) -> str:
        """The folder that ``finalize_once`` writes to."""
        return {"finish": "saved", "new": "new"}.get(self.act, "final")

    def run(self) -> int:
        """Do it in a forked process.

        Returns:
            Its exit code: 0, REFUSED (an error for users), CRASHED (any other one), or
            minus the signal that ended it.
        """
        reads, writes = os.pipe()
        pid = os.fork()
        if not pid:
            code = CRASHED
            try:
                code = self._act(writes)
            finally:
                os._exit(code)
        os.close(writes)
        with open(reads, errors="replace") as pipe:
            self.said = pipe.read()
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def _act(self, answers: int) -> int:
        import resource

        if self.limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, self.limit))
        if self.umask is not None:
            os.umask(self.umask)
        if self.user is not None:
            os.setgroups([])
            os.setgid(self.user)
            os.setuid(self.user)
        if self.clock:
            now = time.time
            time.time = lambda: now() - self.clock
        if self.broken:
            export._publish = _publish_badly
            finishing.finish_in_place = _write_badly
        shim = Shim(Path(self.output_dir), self.at, self.mode, self.errno)
        shim.install()
        try:
            self._export()
        except SpecExportError as problem:
            os.write(answers, str(problem).encode())
            return REFUSED
        except BaseException:
            os.write(answers, traceback.format_exc().encode())
            return CRASHED
        finally:
            if self.log:
                Path(f"{self.output_dir}.log").write_text("\n".join(shim.log))
        return 0

    def _export(self) -> None:
        paths = Path(self.source), Path(self.target), Path(self.output_dir)
        if self.act == "export":
            export_once(*paths, self.step)
        else:
            finalize_once(self.act, *paths)


def _publish_badly(staging: Path, destination: Path, *_: Any) -> Path:
    destination.mkdir()
    for file in sorted(staging.iterdir(), reverse=True):  # the manifest first
        (destination / file.name).write_bytes(file.read_bytes())
    return destination


def _write_badly(folder: Path, manifest: Manifest, name: str, card: bytes) -> None:
    fact = write_file(folder / name, card)
    manifest.files[name] = FileEntry(sha256=fact.sha256, size=fact.size)
    manifest.write(folder)


@dataclass
class State:
    """What a reader sees in an output_dir.

    Attributes:
        steps: The exports that verify.
        half: What is visible and does not verify.
        hidden: Names of what is being made or was left.
    """

    steps: list[str] = field(default_factory=list)
    half: list[str] = field(default_factory=list)
    hidden: list[str] = field(default_factory=list)

    @property
    def outcome(self) -> str:
        """``old``, ``new`` or ``half``."""
        if self.half or not self.steps:
            return "half"
        return "new" if any(s.startswith(step_name(3)) for s in self.steps) else "old"


def look(output_dir: Path) -> State:
    """Verify all that is visible."""
    state = State()
    for path in sorted(output_dir.iterdir()):
        if path.name.startswith("."):
            if not path.name.startswith(".spec_export_run-"):
                state.hidden.append(path.name)
            elif not _is_json(path):
                state.half.append(path.name)
        elif _verifies(path):
            if not path.is_symlink():
                state.steps.append(path.name)
        else:
            state.half.append(path.name)
    links = {p.name for p in output_dir.iterdir() if p.is_symlink()}
    state.half += [f"no link {n}" for n in ("best", "latest") if n not in links]
    if len(step_folders(output_dir)) != len(state.steps):
        state.half.append("a step without a manifest")
    return state


def look_final(trial: Trial) -> State:
    """The same for ``finals``; ``steps`` are the names of those that are finished."""
    state, root = State(), Path(trial.output_dir)
    changed = trial.changed
    for path in sorted(root.rglob(".*")):
        state.hidden.append(path.relative_to(root).as_posix())
    for name in ("saved", "final", "new"):
        folder = root / name
        if name == "new" and not folder.exists():
            continue
        if not folder.is_dir():
            state.half.append(f"no {name}")
        elif not _verifies(folder):
            state.half.append(name)
        elif name != changed or _is_finished(folder, Path(trial.source), trial.act):
            state.steps.append(name)
    return state


def _is_finished(folder: Path, source: Path, act: str) -> bool:
    manifest = Manifest.read(folder)
    card = manifest.files.get(CARD_NAME)
    if manifest.status != "final" or card is None:
        return False
    if card.sha256 == hashlib.sha256(OLD_CARD).hexdigest():
        return False
    if act in ("finish", "again"):
        return True
    name = "fc.weight"
    digest = hashlib.sha256(CheckpointSource.open(source).read(name)).hexdigest()
    return manifest.tensors[name].sha256 == digest


def _verifies(folder: Path) -> bool:
    try:
        return not has_errors(verify(folder, files_only=True).findings)
    except SpecExportError:
        return False


def _is_json(path: Path) -> bool:
    with contextlib.suppress(ValueError):
        json.loads(path.read_text())
        return True
    return False


def answer(trial: Trial) -> dict[str, Any]:
    """Run a trial, look, and let the training go on with another export."""
    output_dir = Path(trial.output_dir)
    code = trial.run()
    if trial.act != "export":
        return _answer_final(trial, code)
    state = look(output_dir)
    if trial.refill:
        (output_dir.parent / "ballast").unlink()
    after = Trial(trial.source, trial.target, trial.output_dir, step=4)
    went_on = after.run() == 0
    later = look(output_dir)
    return {
        "code": code,
        "said": trial.said,
        "outcome": state.outcome,
        "half": state.half,
        "went_on": went_on and later.steps == [step_name(4)] and not later.half,
        "left": later.hidden,
    }


def _answer_final(trial: Trial, code: int) -> dict[str, Any]:
    """The same for ``finalize``, which is asked for once more."""
    state = look_final(trial)
    done = trial.changed in state.steps
    again = Trial(trial.source, trial.target, trial.output_dir, trial.act)
    went_on = (done and trial.act == "new") or again.run() == 0
    later = look_final(again)
    return {
        "code": code,
        "said": trial.said + again.said,
        "outcome": "half" if state.half else "new" if done else "old",
        "half": state.half,
        "went_on": went_on and trial.changed in later.steps and not later.half,
        "left": later.hidden,
    }


def main() -> None:
    warm = False
    for line in sys.stdin:
        job = json.loads(line)
        if not warm:  # templates are read here, not in each of the forked processes
            warm = True
            trial = Trial(**job["trial"])
            place = Path(f"{trial.output_dir}.warm")
            place.mkdir()
            export_once(Path(trial.source), Path(trial.target), place, 3)
        shutil.copytree(job["template"], job["trial"]["output_dir"], symlinks=True)
        print(json.dumps(answer(Trial(**job["trial"]))), flush=True)
        shutil.rmtree(job["trial"]["output_dir"])


if __name__ == "__main__":
    if len(sys.argv) > 1:  # one export, for strace
        export_once(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), 3)
    else:
        main()
