"""How long an export holds the training up, and what it costs in calls and bytes."""

from __future__ import annotations

import importlib
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from speculators.train.checkpointer import SingleGPUCheckpointer

from spec_export.artifact import disk, writer
from spec_export.artifact.weights import WeightFiles, read_json
from spec_export.training import callback as callback_module
from spec_export.training.callback import SGLangExport
from spec_export.training.hook import TrainingEvent
from tests.bench.conftest import ratio, said, timed

FROZEN = ("embed_tokens.weight", "lm_head.weight", "verifier_")


def live_model(source: Path) -> Any:
    """The class that speculators trains, in float32, with the checkpoint's values."""
    config = read_json(source / "config.json")
    module = importlib.import_module("speculators.models.eagle3.core")
    model = module.Eagle3DraftModel(module.Eagle3DraftModel.config_class(**config))
    files = WeightFiles.open(source)
    slots = model.state_dict()
    with torch.no_grad():
        for name in files.tensors:
            array = files.read(name)
            if array.dtype.name == "bfloat16":
                value = torch.from_numpy(array.view("int16").copy()).view(
                    torch.bfloat16
                )
            else:
                value = torch.from_numpy(array.copy())
            slots[name].copy_(value)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(FROZEN))
    return model.float()


@pytest.fixture
def trainer(files: Any, tmp_path: Path) -> Any:
    source, _ = files
    model = live_model(source)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    for parameter in trained:
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    return SimpleNamespace(
        model=model,
        optimizers=[optimizer],
        checkpointer=SingleGPUCheckpointer(tmp_path / "run"),
        resume_from_checkpoint=False,
        global_step=0,
    )


@pytest.mark.timeout(3600)
def test_stall_of_an_export(
    trainer: Any, tmp_path: Path, rounds: int, row: Any, monkeypatch: Any
) -> None:
    counts = {"fsync": 0, "bytes": 0, "copied": 0}
    fsync, write, copy = disk.os.fsync, writer.write_safetensors, torch.Tensor.copy_

    def counted_write(path: Path, *args: Any, **more: Any) -> Any:
        fact = write(path, *args, **more)
        counts["bytes"] += fact.size
        return fact

    def counted_sync(descriptor: int) -> None:
        counts["fsync"] += 1
        fsync(descriptor)

    def counted_copy(self: Any, other: Any, **more: Any) -> Any:
        counts["copied"] += self.nbytes
        return copy(self, other, **more)

    exporter = SGLangExport(output_dir=tmp_path / "exports", compare={"on": "never"})
    exporter.on_event(TrainingEvent("start", trainer, None, 0, 0))
    ours: list[float] = []
    theirs: list[float] = []
    checkpointer, optimizers = trainer.checkpointer, trainer.optimizers

    def save() -> None:
        checkpointer.save_checkpoint(trainer.model, optimizers, 0)

    for step in range(1, rounds + 2):
        trainer.optimizers[0].step()
        theirs.append(timed(save))
        event = TrainingEvent("epoch", trainer, 0, 0, step)
        if step == rounds + 1:
            monkeypatch.setattr(disk.os, "fsync", counted_sync)
            monkeypatch.setattr(writer, "write_safetensors", counted_write)
            monkeypatch.setattr(torch.Tensor, "copy_", counted_copy)
        ours.append(timed(lambda event=event: exporter.on_event(event)))
        exporter.close()
    assert exporter.errors == []
    first, ours, theirs = ours[0], ours[1:], theirs[1:]
    found = ratio(ours, theirs)
    row(
        f"stall per export        {said(ours)}, the first {first * 1e3:.0f} ms; "
        f"save_checkpoint {said(theirs)}; ratio {found:.3f} (<= 0.10)"
    )
    weights = exporter.results[-1].folder / "model.safetensors"
    held = weights.stat().st_size
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    row(
        f"per export              {counts['fsync']} fsyncs, "
        f"{counts['bytes'] / held:.2f} x its weights written, "
        f"{counts['copied'] / (2 * trained):.2f} x the trained ones copied"
    )
    assert counts["bytes"] == held
    assert counts["fsync"] <= 10
    assert counts[
        "copied"
    ] <= 2 * trained + 16 * trainer.model.config.draft_vocab_size + (
        trainer.model.config.transformer_layer_config.vocab_size
    )
    assert found <= 0.10
    forwards_and_leg(trainer, tmp_path, statistics.median(theirs), row)


def forwards_and_leg(trainer: Any, tmp_path: Path, save: float, row: Any) -> None:
    """Leg 1 in the thread of the training: reported, in units of forwards."""
    from spec_export.judge import Inputs, cast_leg, training_logits

    positions = 64
    config = read_json(tmp_path / "run" / "0" / "config.json")
    inputs = Inputs.for_config(config, positions=positions)
    forward = timed(lambda: training_logits(trainer.model, inputs, 3))
    leg = timed(lambda: cast_leg(trainer.model, inputs, torch.bfloat16, 3))
    row(
        f"leg 1, {positions} positions     {leg * 1e3:.0f} ms: {leg / forward:.1f} "
        f"forwards of 3 steps, {leg / save:.2f} of save_checkpoint"
    )
    assert callback_module.live_judge is not None
