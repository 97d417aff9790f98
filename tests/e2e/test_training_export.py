"""``SGLangExport`` in the real trainer: which exports there are, and what they say."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import signal
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.numpy import load_file
from speculators.train import cli as speculators_cli
from speculators.train.config import TrainConfig

from spec_export.findings import SpecExportError, error
from spec_export.judge import Leg
from spec_export.training import callback as callback_module
from spec_export.training import launch, ranks
from spec_export.training.attach import attach
from spec_export.training.callback import SGLangExport
from spec_export.training.cpu import adapt_flags, cpu_runtime
from spec_export.training.hook import TrainingEvent
from tests.helpers.tiny import REPOSITORY, Tiny, run_training

NEVER = {"on": "never"}


def exporter(tmp_path: Path, **init_args: Any) -> SGLangExport:
    init_args.setdefault("compare", NEVER)
    return SGLangExport(output_dir=tmp_path / "exports", **init_args)


def manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "spec_export_manifest.json").read_text())


def names(tmp_path: Path) -> list[str]:
    """The exports, without links and the state file."""
    return sorted(
        child.name
        for child in (tmp_path / "exports").iterdir()
        if child.is_dir() and not child.is_symlink()
    )


def link(tmp_path: Path, name: str) -> str:
    return os.readlink(tmp_path / "exports" / name)


def recipe(tmp_path: Path, tiny: Tiny, **train: Any) -> Path:
    """A recipe file with our callback, that needs no other flag."""
    content = {
        "train": {
            "verifier": {"verifier_name_or_path": str(tiny.target)},
            "draft": {
                "draft_vocab_size": 128,
                "norm_before_residual": False,
                "full_attention_indices": [0],
                **train,
            },
            "data": {"data_path": str(tiny.data), "total_seq_len": 256},
            "generation": {"on_missing": "raise"},
            "trainer": {
                "epochs": 1,
                "max_steps": 3,
                "log_freq": 1000,
                "save_path": str(tmp_path / "run"),
            },
        },
        "callbacks": [
            {
                "class_path": "spec_export.SGLangExport",
                "init_args": {
                    "output_dir": str(tmp_path / "exports"),
                    "compare": NEVER,
                    "plugin": "never",
                },
            }
        ],
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_a_recipe_trains_and_exports(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recipe(tmp_path, tiny)
    assert launch.main(["--config", str(path), "--max-steps", "2"]) == 0
    assert "training on the CPU; --loss-implementation eager" in capsys.readouterr().err
    assert names(tmp_path) == ["step-00000002"]  # the flag beat the recipe
    assert link(tmp_path, "latest") == link(tmp_path, "best") == "step-00000002"

    folder = tmp_path / "exports" / "step-00000002"
    written = manifest(folder)
    assert written["status"] == "saved"
    assert written["training"]["global_step"] == 2
    assert written["training"]["epoch"] == 0
    used = written["training"]["recipe"]["train"]
    assert used["draft"]["draft_vocab_size"] == 128
    assert used["trainer"]["max_steps"] == 2  # what was used, not what was written
    run_yaml = (tmp_path / "run" / "run.yaml").read_bytes()
    digest = hashlib.sha256(run_yaml).hexdigest()
    assert written["training"]["recipe_digest"] == digest
    assert str(tmp_path) not in json.dumps(written)
    tensors = written["tensors"]
    assert tensors["lm_head.weight"]["role"] == "frozen"
    assert tensors["lm_head.weight"]["equals_target"] is True
    assert tensors["fc.weight"]["role"] == "trained"
    assert tensors["fc.weight"]["changed_in_training"] is True
    assert tensors["fc.weight"]["in_optimizer"] is True
    assert tensors["d2t"]["role"] == "buffer"

    trained = load_file(tmp_path / "run" / "0" / "model.safetensors")
    exported = load_file(folder / "model.safetensors")
    assert exported["fc.weight"].tobytes() == trained["fc.weight"].tobytes()


def test_each_save_of_the_trainer_is_exported_once(tiny: Tiny, tmp_path: Path) -> None:
    exports = exporter(tmp_path)
    flags = ("--checkpoint-freq", "0.5")
    run_training(tiny.flags(tmp_path / "run", *flags), exports)
    steps = [r.manifest.training.global_step for r in exports.results]
    assert len(steps) == 2
    assert names(tmp_path) == [f"step-{step:08d}" for step in steps]
    assert exports.errors == []
    runs = {r.manifest.run_id for r in exports.results}
    assert len(runs) == 1


def test_the_last_weights_are_exported_where_the_trainer_saves_none(
    tiny: Tiny, tmp_path: Path
) -> None:
    exports = exporter(tmp_path)
    flags = ("--epochs", "3", "--max-steps", "1", "--checkpoint-freq", "2")
    run_training(tiny.flags(tmp_path / "run", *flags), exports)
    # One step per epoch; the trainer saves epochs 0 and 1 and not the last one.
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]
    assert link(tmp_path, "latest") == "step-00000003"


def test_every_best_exports_the_best_only(tiny: Tiny, tmp_path: Path) -> None:
    exports = exporter(tmp_path, every="best")

    def worse_from_the_second_epoch(event: TrainingEvent) -> None:
        if event.reason == "best":
            event.trainer.best_val_loss = 0.0

    flags = ("--epochs", "2", "--max-steps", "1")
    run_training(
        tiny.flags(tmp_path / "run", *flags),
        exports,
        Calls(worse_from_the_second_epoch),
    )
    assert names(tmp_path) == ["step-00000001"]
    assert link(tmp_path, "best") == "step-00000001"


def test_save_best_leaves_the_exports_alone(tiny: Tiny, tmp_path: Path) -> None:
    exports = exporter(tmp_path)
    flags = ("--save-best", "--epochs", "2", "--max-steps", "1")
    run_training(tiny.flags(tmp_path / "run", *flags), exports)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    assert exports.errors == []


def test_every_n_steps(tiny: Tiny, tmp_path: Path) -> None:
    exports = exporter(tmp_path, every={"steps": 2}, keep_last=2, when_busy="wait")
    run_training(tiny.flags(tmp_path / "run", "--max-steps", "5"), exports)
    # 2, 4, and the end; the oldest of them is not kept.
    assert [r.manifest.training.global_step for r in exports.results] == [2, 4, 5]
    assert names(tmp_path) == ["step-00000004", "step-00000005"]
    assert link(tmp_path, "best") == "step-00000005"


class Calls:
    def __init__(self, function: Any) -> None:
        self.on_event = function


def test_a_nan_is_never_the_best(tiny: Tiny, tmp_path: Path) -> None:
    def diverge(event: TrainingEvent) -> None:
        if event.reason == "start":
            validate = event.trainer.val_epoch
            event.trainer.val_epoch = lambda epoch: (
                validate(epoch) | {"loss_epoch": float("nan")}
            )

    exports = exporter(tmp_path)
    flags = tiny.flags(tmp_path / "run", "--max-steps", "1")
    run_training(flags, Calls(diverge), exports)
    assert (tmp_path / "run" / "checkpoint_best").is_symlink()  # speculators' own
    assert names(tmp_path) == ["step-00000001"]
    assert not (tmp_path / "exports" / "best").is_symlink()


def losses(*values: float) -> Calls:
    """Validation losses by epoch."""

    def start(event: TrainingEvent) -> None:
        if event.reason == "start":
            validate = event.trainer.val_epoch
            event.trainer.val_epoch = lambda epoch: (
                validate(epoch) | {"loss_epoch": values[epoch]}
            )

    return Calls(start)


def test_after_a_nan_the_trainer_takes_any_loss_for_the_best_and_we_do_not(
    tiny: Tiny, tmp_path: Path
) -> None:
    given = losses(1.0, float("nan"), 3.0, 2.0, 0.5)
    for epochs, best in (("2", 1), ("4", 1), ("5", 5)):  # also over a resume
        exports = exporter(tmp_path, keep_last=1)
        flags = ("--epochs", epochs, "--max-steps", "1")
        run_training(tiny.flags(tmp_path / "run", *flags), given, exports)
        assert exports.errors == []
        assert link(tmp_path, "best") == f"step-{best:08d}"
        kept = {f"step-{step:08d}" for step in (best, int(epochs))}
        assert set(names(tmp_path)) == kept
        trainers = os.readlink(tmp_path / "run" / "checkpoint_best")
        assert trainers == {"2": "1", "4": "3", "5": "4"}[epochs]


def test_an_interrupted_training_exports_what_it_has(
    tiny: Tiny, tmp_path: Path
) -> None:
    def interrupt(event: TrainingEvent) -> None:
        if event.reason == "step" and event.global_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    exports = exporter(tmp_path)
    run_training(tiny.flags(tmp_path / "run"), exports, Calls(interrupt))
    assert names(tmp_path) == ["step-00000003"]
    assert exports.errors == []


def test_a_signal_within_an_export_still_interrupts(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the snapshot, so that the interrupted save has to take another one."""
    take = callback_module.take_snapshot
    calls = []

    def signalled(event: TrainingEvent, *args: Any) -> Any:
        calls.append(event.reason)
        if calls == ["start", "step"]:
            os.kill(os.getpid(), signal.SIGTERM)
        return take(event, *args)

    monkeypatch.setattr(callback_module, "take_snapshot", signalled)
    exports = exporter(tmp_path, every={"steps": 2})
    run_training(tiny.flags(tmp_path / "run"), exports)
    assert names(tmp_path) == ["step-00000002"]
    assert calls == ["start", "step", "interrupted"]
    assert exports.errors == []


def broken(*_args: Any) -> Any:
    raise OSError("the disk is gone")


def test_a_failed_export_does_not_end_the_training(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callback_module, "write_export", broken)
    exports = exporter(tmp_path)
    run_training(tiny.flags(tmp_path / "run", "--max-steps", "1"), exports)
    assert [str(problem) for problem in exports.errors] == ["the disk is gone"]
    assert names(tmp_path) == []
    assert (tmp_path / "run" / "0" / "training_state.json").is_file()


def test_on_error_raise_ends_it(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callback_module, "write_export", broken)
    exports = exporter(tmp_path, on_error="raise")
    with pytest.raises(OSError, match="the disk is gone"):
        run_training(tiny.flags(tmp_path / "run", "--max-steps", "1"), exports)


def test_roles_survive_a_resume(tiny: Tiny, tmp_path: Path) -> None:
    first = exporter(tmp_path)
    run_training(tiny.flags(tmp_path / "run", "--max-steps", "2"), first)
    (file,) = (tmp_path / "exports").glob(".spec_export_run-*.json")
    state = json.loads(file.read_text())
    assert "fc.weight" in state["moved"]
    assert "lm_head.weight" not in state["moved"]

    # One more epoch whose single step leaves the weights alone: a learning rate of
    # zero. What moved in the first process is still known to have moved.
    second = exporter(tmp_path)
    more = ("--epochs", "2", "--max-steps", "1", "--lr", "0", "--muon-lr", "0")
    run_training(tiny.flags(tmp_path / "run", *more), second)
    (result,) = second.results
    assert result.manifest.run_id == first.results[0].manifest.run_id
    assert result.manifest.training.global_step == 3
    tensors = manifest(result.folder)["tensors"]
    assert tensors["fc.weight"]["role"] == "trained"
    assert tensors["lm_head.weight"]["role"] == "frozen"
    assert tensors["lm_head.weight"]["changed_in_training"] is False


def test_a_second_training_is_another_run(tiny: Tiny, tmp_path: Path) -> None:
    flags = tiny.flags(tmp_path / "run", "--max-steps", "1")
    first, second = exporter(tmp_path), exporter(tmp_path)
    run_training(flags, first)
    run_training([*flags, "--no-resume-from-checkpoint", "--seed", "1"], second)
    assert names(tmp_path) == ["step-00000001", "step-00000001.2"]
    runs = {r.manifest.run_id for e in (first, second) for r in e.results}
    assert len(runs) == 2


def test_a_draft_that_cannot_be_served_is_refused_before_a_model_is_built(
    tiny: Tiny,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def must_not_run(_config: Any) -> None:
        raise AssertionError("speculators was started")

    monkeypatch.setattr(launch.speculators_cli, "main", must_not_run)
    path = recipe(tmp_path, tiny, norm_before_residual=True)
    arguments = ["--config", str(path)]
    assert launch.main(arguments) == 1
    told = capsys.readouterr().err
    assert "error[norm-before-residual]" in told
    assert "--no-norm-before-residual" in told
    assert not (tmp_path / "run").exists()
    with pytest.raises(AssertionError, match="speculators was started"):
        launch.main([*arguments, "--no-norm-before-residual"])


def test_the_live_module_is_planned_before_the_first_step(
    tiny: Tiny, tmp_path: Path
) -> None:
    exports = exporter(tmp_path, plugin="never")
    flags = [*tiny.flags(tmp_path / "run"), "--norm-before-residual"]
    with pytest.raises(SpecExportError) as caught:
        run_training(flags, exports)
    assert "norm-before-residual" in {f.code for f in caught.value.findings}
    assert not (tmp_path / "exports").exists()
    assert not (tmp_path / "run" / "0").exists()


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"output_dir": "run/exports"}, "output-inside-save-path"),
        ({"sglang": "0.5.17", "keep": 3}, "callback-argument"),
        ({"sglang": "not-a-release"}, "option-invalid"),
    ],
)
def test_arguments_that_make_no_sense_end_with_exit_code_2(
    tiny: Tiny,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, Any],
    code: str,
) -> None:
    path = recipe(tmp_path, tiny)
    content = yaml.safe_load(path.read_text())
    if "output_dir" in change:
        change = {"output_dir": str(tmp_path / change["output_dir"])}
    content["callbacks"][0]["init_args"] |= change
    path.write_text(yaml.safe_dump(content))
    assert launch.main(["--config", str(path)]) == 2
    assert f"error[{code}]" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_an_unknown_flag_is_speculators_own_error(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        launch.main(["--config", str(recipe(tmp_path, tiny)), "--no-such-flag"])
    assert caught.value.code == 2
    assert "unrecognized arguments: --no-such-flag" in capsys.readouterr().err


def test_a_dry_run_works_without_an_accelerator(tiny: Tiny, tmp_path: Path) -> None:
    assert launch.main(["--config", str(recipe(tmp_path, tiny)), "--dry-run"]) == 0
    assert (tmp_path / "run" / "model.safetensors").is_file()
    assert not (tmp_path / "exports").exists()


def test_exports_and_comparisons_change_nothing_in_the_training(
    tiny: Tiny, tmp_path: Path
) -> None:
    modes: list[bool] = []
    watch = Calls(lambda event: modes.append(event.trainer.model.training))
    exports = exporter(
        tmp_path, every={"steps": 1}, compare={"positions": 32}, when_busy="wait"
    )
    flags = ("--max-steps", "3")
    run_training(tiny.flags(tmp_path / "run", *flags), exports, watch)
    run_training(tiny.flags(tmp_path / "plain", *flags))
    with_us, without = (
        (tmp_path / name / "0" / "model.safetensors").read_bytes()
        for name in ("run", "plain")
    )
    assert with_us == without
    # start, three steps, the save; validation; then best and end.
    assert modes == [True] * 5 + [False] * 2
    assert len(exports.results) == 3
    for result in exports.results:
        legs = result.manifest.comparison
        assert (legs["cast"].verdict, legs["layout"].verdict) == ("pass", "pass")
        assert legs["layout"].positions == 32


def test_a_failed_comparison_is_published_as_failed_and_never_linked(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leg = Leg("layout", "fail", "broken on purpose")
    monkeypatch.setattr(
        callback_module, "live_judge", lambda *_args: lambda _folder: {"layout": leg}
    )
    exports = exporter(tmp_path, compare={"on": "checkpoint"})
    run_training(tiny.flags(tmp_path / "run", "--max-steps", "1"), exports)
    assert names(tmp_path) == ["step-00000001.failed"]
    assert not (tmp_path / "exports" / "latest").is_symlink()
    assert not (tmp_path / "exports" / "best").is_symlink()
    (problem,) = exports.errors
    assert isinstance(problem, SpecExportError)
    assert "comparison-failed" in {f.code for f in problem.findings}


def test_a_pretrained_draft_is_live_in_bfloat16(tiny: Tiny, tmp_path: Path) -> None:
    flags = tiny.flags(tmp_path / "run", "--max-steps", "1")
    run_training(flags)
    at = flags.index("--full-attention-indices")
    flags = [*flags[:at], *flags[at + 2 :], "--save-path", str(tmp_path / "second")]
    dtypes: set[Any] = set()

    def look(event: TrainingEvent) -> None:
        dtypes.update(p.dtype for p in event.trainer.model.parameters())

    exports = exporter(tmp_path)
    more = ("--from-pretrained", str(tmp_path / "run" / "0"))
    run_training([*flags, *more], exports, Calls(look))
    assert dtypes == {torch.bfloat16}
    assert exports.errors == []
    (result,) = exports.results
    assert result.manifest.tensors["fc.weight"].role == "trained"


def test_attach_from_python(tiny: Tiny, tmp_path: Path) -> None:
    """Somebody who makes the trainer without our command."""
    exports = exporter(tmp_path)
    trainers: list[Any] = []

    def run_attached(trainer: Any) -> None:
        with attach(trainer, exports) as attached:
            assert attached is trainer
            trainer.run_training()
        assert "run_training" not in vars(trainer)

    config = TrainConfig.resolve(tiny.flags(tmp_path / "run", "--max-steps", "1"))
    adapt_flags(config)
    with cpu_runtime() as trainer_class:

        def make(*args: Any) -> Any:
            trainers.append(trainer_class(*args))
            return SimpleNamespace(run_training=lambda: run_attached(trainers[0]))

        speculators_cli.Trainer, original = make, speculators_cli.Trainer
        try:
            speculators_cli.main(config)
        finally:
            speculators_cli.Trainer = original
    assert names(tmp_path) == ["step-00000001"]


class TwoRanks:
    """``torch.distributed`` as one rank of two sees it; rank 0 goes first."""

    def __init__(self, rank: int, mail: list[Any]) -> None:
        self.rank, self.mail = rank, mail
        self.is_available = self.is_initialized = lambda: True
        self.get_world_size = lambda: 2
        self.get_rank = lambda: rank

    def broadcast_object_list(self, objects: list[Any], src: int) -> None:
        assert src == 0
        if self.rank == 0:
            self.mail[:] = pickle.loads(pickle.dumps(objects))
        else:
            objects[:] = self.mail


@pytest.mark.parametrize(
    "problem",
    [
        None,
        SpecExportError([error("disk-full", "x", "no space")], exit_code=2),
        OSError(5, "Input/output error"),
    ],
)
def test_every_rank_learns_what_happened_on_rank_0(
    monkeypatch: pytest.MonkeyPatch, problem: Exception | None
) -> None:
    def act() -> str:
        if problem is not None:
            raise problem
        return "done"

    def must_not_act() -> str:
        raise AssertionError("rank 1 acted")

    mail: list[Any] = []
    outcomes = []
    for rank, function in enumerate((act, must_not_act)):
        monkeypatch.setattr(ranks, "dist", TwoRanks(rank, mail))
        try:
            outcomes.append(ranks.on_rank0(function))
        except Exception as caught:
            outcomes.append(caught)
    first, second = outcomes
    if problem is None:
        assert outcomes == ["done", None]
    elif isinstance(problem, SpecExportError):
        assert first is problem
        assert isinstance(second, SpecExportError)
        assert (second.findings, second.exit_code) == (problem.findings, 2)
    else:
        assert first is problem
        assert "Input/output error" in str(second)


def test_plain_speculators_takes_the_demo_recipe_without_a_warning(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "demo_out").symlink_to(tiny.root)
    monkeypatch.chdir(tmp_path)
    arguments = ["--config", str(REPOSITORY / "recipes" / "tiny_cpu.yaml"), "--dry-run"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        config = TrainConfig.resolve([*arguments, "--save-path", "run"])
        speculators_cli.main(config)
    assert Path("run/model.safetensors").is_file()
    # What a misplaced block would look like to speculators.
    text = (REPOSITORY / "recipes" / "tiny_cpu.yaml").read_text()
    Path("wrong.yaml").write_text(text.replace("\ncallbacks:", "\n  callbacks:"))
    with pytest.warns(UserWarning, match="unrecognised keys.*callbacks"):
        TrainConfig.resolve(["--config", "wrong.yaml"])
