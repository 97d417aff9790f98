"""How long an export holds the training up, and what it costs in calls and bytes."""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from speculators.train.checkpointer import SingleGPUCheckpointer
from torch.nn.attention.flex_attention import create_mask

from spec_export.artifact import disk, writer
from spec_export.artifact.weights import WeightFiles, read_json
from spec_export.training.callback import SGLangExport
from spec_export.training.compare import live_cast, rows_of
from spec_export.training.draft_config import checkpoint_config
from spec_export.training.hook import TrainingEvent
from spec_export.training.recipe import CallbackConfig
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
    # Four of them are the state of the run, which is told that one begins and is done.
    assert counts["fsync"] <= 13
    assert counts[
        "copied"
    ] <= 2 * trained + 16 * trainer.model.config.draft_vocab_size + (
        trainer.model.config.transformer_layer_config.vocab_size
    )
    assert found <= 0.10
    leg_one(trainer, rounds, row)


def leg_one(trainer: Any, rounds: int, row: Any) -> None:
    """Leg 1 and the probe's logits, in forwards of the training for the same rows."""
    model, positions = trainer.model, 256
    settings = CallbackConfig(
        output_dir=Path("unused"), compare={"positions": positions}
    )
    forward = training_forward(model, positions)
    live_cast(model, settings, None)  # the first one pays for caches
    forwards, legs, found = [], [], None
    for _ in range(rounds):
        began = time.process_time()
        forward()
        between = time.process_time()
        found = live_cast(model, settings, None)
        forwards.append(between - began)
        legs.append(time.process_time() - between)
    assert found is not None and found.leg.passed and found.logits is not None
    assert found.leg.positions == positions
    cost = ratio(legs, forwards)
    row(
        f"leg 1 and probe         {said(legs)} of CPU for {positions} positions; a "
        f"training forward of them {said(forwards)}; ratio {cost:.2f} (<= 3)"
    )
    # How many forwards there are is counted in tests/judge; this has a clock's noise.
    assert cost <= 3.3


def training_forward(model: Any, positions: int) -> Any:
    """What the trainer runs in a step on a CPU: chained steps and their loss."""
    config = model.config
    config.transformer_layer_config._attn_implementation = model._attn_impl = "sdpa"
    model._create_mask_fn = create_mask
    with torch.no_grad():  # of the target, which the loss alone needs
        model.verifier_lm_head.weight.copy_(model.lm_head.weight)
    rows = rows_of(checkpoint_config(config, "bfloat16"), positions, None)
    arguments, _ = model.get_trainer_kwargs(
        loss_fn="kl_div",
        loss_implementation="eager",
        ttt_steps=3,
        ttt_step_loss_decay=1.0,
    )
    batch = {
        "hidden_states": rows.aux[None],
        "input_ids": rows.token_ids[None],
        "document_ids": rows.document_ids[None],
        "position_ids": rows.position_ids[None],
        "loss_mask": torch.ones(1, positions, dtype=torch.bool),
        "verifier_last_hidden_states": rows.aux[None, :, : model.hidden_size],
    }
    model.train()
    return lambda: model(**batch, **arguments)
