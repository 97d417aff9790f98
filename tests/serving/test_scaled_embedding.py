"""The real SGLang serves block drafts of a target that scales its embedding.

A Gemma-4 of eight layers, whose tied head is its embedding module, as in the models
that are published; and the same with a head of its own, which DSPARK needs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from loguru import logger
from safetensors.torch import load_file, save_file
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from spec_export import cli
from tests.helpers.record import record
from tests.serving import blocks, drafts
from tests.serving.blocks import VARIANTS
from tests.serving.broken import Config, Tensors, break_export
from tests.serving.conftest import continuations, export_draft
from tests.serving.sglang_process import Engine
from tests.serving.simulate import (
    NEW_TOKENS,
    STEPS,
    Continuation,
    accept_length,
    same_histograms,
)

BY_NAME = {variant.name: variant for variant in VARIANTS}
SCALE = 8  # the root of drafts.HIDDEN


def make_gemma(folder: Path) -> Path:
    """A random Gemma-4, tied; its layers weigh as much as its embedding."""
    torch.manual_seed(0)
    config = Gemma4TextConfig(
        vocab_size=drafts.VOCAB,
        hidden_size=drafts.HIDDEN,
        intermediate_size=128,
        num_hidden_layers=drafts.LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        global_head_dim=16,
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
        max_position_embeddings=512,
        sliding_window=512,
        layer_types=["sliding_attention", "full_attention"] * (drafts.LAYERS // 2),
        rms_norm_eps=1e-6,
        initializer_range=0.25,
        bos_token_id=drafts.VOCAB - 2,
        eos_token_id=drafts.VOCAB - 1,
        pad_token_id=0,
    )
    gemma = Gemma4ForCausalLM(config)
    gemma.model.embed_tokens.weight.data *= 0.25
    for parameter in gemma.parameters():
        parameter.data = parameter.data.bfloat16().float()
    gemma.save_pretrained(folder)
    return folder


def untied(target: Path, folder: Path) -> Path:
    """The same model with its head as a tensor of its own."""
    folder.mkdir()
    config = json.loads((target / "config.json").read_text())
    config["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(config))
    held = load_file(target / "model.safetensors")
    held["lm_head.weight"] = held["model.embed_tokens.weight"].clone()
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the target."""
    logger.disable("speculators")
    return make_gemma(tmp_path_factory.mktemp("gemma") / "tiny-gemma")


@pytest.fixture(scope="module")
def texts_of_gemma(gemma: Path) -> list[Continuation]:
    """Prompts with its greedy continuations."""
    return continuations(gemma)


def serve(
    engine: Engine, target: Path, export: Path, texts: list[Continuation]
) -> list[dict[str, Any]]:
    """The draft's own launch line; one pool for window and full layers alike."""
    manifest = json.loads((export / "spec_export_manifest.json").read_text())
    return engine.serve(
        target,
        export,
        [text.tokens[: text.prompt].tolist() for text in texts],
        NEW_TOKENS,
        STEPS,
        disable_hybrid_swa_memory=True,
        **blocks.arguments(manifest["serving"]["algorithm"]),
    )


def _unscaled(tensors: Tensors, config: Config) -> None:
    for name in tensors:
        if name.split(".")[-2] in ("fc", "q_proj", "k_proj", "o_proj", "down_proj"):
            tensors[name] = tensors[name] / SCALE
    config["rms_norm_eps"] /= SCALE**2


def test_dflash(
    gemma: Path,
    texts_of_gemma: list[Continuation],
    block_engine: Engine,
    tmp_path: Path,
) -> None:
    variant, texts = BY_NAME["dflash"], texts_of_gemma
    checkpoint, export = tmp_path / "checkpoint", tmp_path / "export"
    blocks.make_checkpoint(variant, gemma, texts, checkpoint)
    export_draft(checkpoint, export, gemma)
    wanted = blocks.rounds(blocks.load_draft(checkpoint, variant.kind), texts)
    served = serve(block_engine, gemma, export, texts)
    equal = same_histograms(served, wanted)
    print(f"{sum(equal)}/{len(equal)} equal, accept {accept_length(wanted):.3f}")
    record("engine", "dflash, Gemma-4 target", f"{sum(equal)}/{len(equal)}")
    assert [a["output_ids"] for a in served] == [text.new_tokens for text in texts]
    assert all(equal)
    break_export(export, tmp_path / "unscaled", _unscaled)
    served = serve(block_engine, gemma, tmp_path / "unscaled", texts)
    assert [a["output_ids"] for a in served] == [text.new_tokens for text in texts]
    assert not any(same_histograms(served, wanted))


def test_dspark_needs_a_head_of_its_own(
    gemma: Path,
    texts_of_gemma: list[Continuation],
    block_engine: Engine,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    variant, texts = BY_NAME["dspark-vanilla"], texts_of_gemma
    other = untied(gemma, tmp_path / "untied")
    checkpoint, export = tmp_path / "checkpoint", tmp_path / "export"
    blocks.make_checkpoint(variant, other, texts, checkpoint)
    refused = ["finalize", str(checkpoint), "--output", str(tmp_path / "no")]
    assert cli.run([*refused, "--target", str(gemma), "--no-compare"]) == 1
    assert "error[target-unsupported] architectures" in capsys.readouterr().err
    export_draft(checkpoint, export, other)
    wanted = blocks.rounds(blocks.load_draft(checkpoint, variant.kind), texts)
    served = serve(block_engine, other, export, texts)
    assert [a["histogram"] for a in served] == [r.histogram for r in wanted]
    # Why it is refused: the embedding module has nothing that the class asks for.
    with pytest.raises(pytest.fail.Exception, match="has no attribute 'quant_method'"):
        serve(block_engine, gemma, export, texts)
