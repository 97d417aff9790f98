"""What the callback's thread does for one export, in a process without torch.

As a program it reads trials from its standard input, one JSON object a line, forks a
process for each, lets that be killed or fail, and answers what is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spec_export import export
from spec_export.artifact.disk import replace_file
from spec_export.artifact.publish import settle, step_name
from spec_export.artifact.resolve import step_folders
from spec_export.artifact.runs import state_path
from spec_export.artifact.source import CheckpointSource
from spec_export.artifact.target import open_target
from spec_export.export import ExportOptions, export_source
from spec_export.findings import SpecExportError, has_errors
from spec_export.serving.verify import verify
from tests.faults.shim import Shim

REFUSED, CRASHED = 3, 4


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


@dataclass
class Trial:
    """One export that something happens to.

    Attributes:
        source, target: What is exported.
        output_dir: Where to, with an export or two in it.
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
        shim = Shim(Path(self.output_dir), self.at, self.mode, self.errno)
        shim.install()
        try:
            export_once(
                Path(self.source), Path(self.target), Path(self.output_dir), self.step
            )
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


def _publish_badly(staging: Path, destination: Path, *_: Any) -> Path:
    destination.mkdir()
    for file in sorted(staging.iterdir(), reverse=True):  # the manifest first
        (destination / file.name).write_bytes(file.read_bytes())
    return destination


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
