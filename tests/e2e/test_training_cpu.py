"""What is adapted where no accelerator exists, and that nothing is where one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from speculators.train import checkpointer
from speculators.train import cli as speculators_cli
from speculators.train.config import TrainConfig

from spec_export.training import launch
from spec_export.training.cpu import adapt_flags, cpu_runtime
from tests.helpers.tiny import Tiny

ADAPTED = {
    "--loss-implementation": "eager in the place of fused",
    "--num-workers": "0 in the place of 12",
    "--draft-attn-impl": "sdpa in the place of simple_flex_attention",
    "--hidden-states-dtype": "float32 in the place of bfloat16",
}


def adapted(tiny: Tiny, *flags: str) -> tuple[TrainConfig, dict[str, str]]:
    config = TrainConfig.resolve(tiny.flags(Path("run"), *flags))
    findings = adapt_flags(config)
    assert {f.code for f in findings} <= {"adapted"}
    return config, {f.subject: f.message for f in findings}


def test_defaults_that_need_an_accelerator_are_changed(tiny: Tiny) -> None:
    config, told = adapted(tiny)
    assert told == ADAPTED
    assert config.loss.loss_implementation == "eager"
    assert config.data.num_workers == 0
    assert config.draft.draft_attn_impl == "sdpa"
    assert config.data.hidden_states_dtype == "float32"
    # run.yaml stays good for a GPU.
    assert "eager" not in config.dump_yaml()


def test_what_the_user_has_set_stays(tiny: Tiny) -> None:
    flags = ("--loss-implementation", "fused", "--num-workers", "3")
    config, told = adapted(tiny, *flags, "--draft-attn-impl", "eager")
    assert told == {"--hidden-states-dtype": ADAPTED["--hidden-states-dtype"]}
    assert config.loss.loss_implementation == "fused"
    assert config.data.num_workers == 3
    assert config.draft.draft_attn_impl == "eager"


def test_a_dry_run_keeps_its_dtype_and_mtp_its_attention(tiny: Tiny) -> None:
    assert "--hidden-states-dtype" not in adapted(tiny, "--dry-run")[1]
    flags = tiny.flags(Path("run"))
    at = flags.index("--full-attention-indices")
    config = TrainConfig.resolve([*flags[:at], *flags[at + 2 :]])
    config.speculator_type = "mtp"
    assert "--draft-attn-impl" not in {f.subject for f in adapt_flags(config)}


def patched() -> list[Any]:
    return [
        torch.accelerator.synchronize,
        checkpointer.get_current_device,
        speculators_cli.maybe_setup_distributed,
        speculators_cli.Trainer,
    ]


def test_everything_is_put_back() -> None:
    before = patched()
    with pytest.raises(RuntimeError), cpu_runtime():
        assert patched()[:3] != before[:3]
        raise RuntimeError
    assert patched() == before


def test_with_an_accelerator_nothing_is_changed(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = patched()
    seen: list[Any] = []

    def main(config: TrainConfig) -> None:
        seen.append((config.flatten(), patched()))

    monkeypatch.setattr(launch, "has_accelerator", lambda: True)
    monkeypatch.setattr(speculators_cli, "main", main)
    flags = tiny.flags(tmp_path / "run")
    assert launch.main(flags) == 0
    ((used, during),) = seen
    assert used == TrainConfig.resolve(flags).flatten()
    assert during[:3] == before[:3]
    assert patched() == before
