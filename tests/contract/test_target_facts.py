"""Facts about target classes (``targets.yaml``) that stand in the wheels' sources."""

from __future__ import annotations

import ast
import zipfile
from functools import cache

import pytest

from spec_export.layout.targets import target_classes
from tests.contract.wheels import fetch

RELEASES = ["0.5.17", "0.5.23"]
HOOK = "set_dflash_layers_to_capture"


@cache
def source(release: str, name: str) -> str:
    """A file under ``sglang/srt`` of a release."""
    with zipfile.ZipFile(fetch(release)) as archive:
        return archive.read(f"sglang/srt/{name}").decode()


def classes(release: str, name: str) -> dict[str, ast.ClassDef]:
    tree = ast.parse(source(release, name))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def hooks(cls: ast.ClassDef) -> list[str]:
    """The bodies of the DFlash hook in a class; the last one counts."""
    return [
        ast.unparse(node)
        for node in cls.body
        if isinstance(node, ast.FunctionDef) and node.name == HOOK
    ]


@pytest.mark.parametrize("release", RELEASES)
def test_gemma_4_scales_inside_its_embedding_module(release: str) -> None:
    module = classes(release, "models/gemma3_causal.py")[
        "Gemma3TextScaledWordEmbedding"
    ]
    assert [ast.unparse(base) for base in module.bases] == ["nn.Embedding"]
    assert "super().forward(input_ids) * self.embed_scale" in ast.unparse(module)
    gemma = source(release, "models/gemma4_causal.py")
    assert "Gemma4TextScaledWordEmbedding = Gemma3TextScaledWordEmbedding" in gemma
    assert "embed_scale=self.config.hidden_size**0.5" in gemma
    # Tied, the head is that module, which has neither of these two.
    assert "self.lm_head = self.model.embed_tokens" in gemma
    dspark = source(release, "models/dspark.py")
    assert "lm_head.org_vocab_size" in dspark
    known = target_classes()["Gemma4ForCausalLM"]
    assert known.scaled_by_root_of == "hidden_size" and known.bare_tied_head


@pytest.mark.parametrize("release", RELEASES)
def test_block_drafts_start_from_what_that_module_gives(release: str) -> None:
    worker = source(release, "speculative/dflash_worker_v2.py")
    assert "target_model.get_input_embeddings()" in worker
    assert "noise_embedding = embed_module(block_ids)" in worker
    assert "self.embed_tokens(input_ids)" in source(release, "models/dspark.py")


@pytest.mark.parametrize("release", RELEASES)
def test_every_norm_of_the_class_has_the_one_eps(release: str) -> None:
    """Or scaling what goes into them would not be undone."""
    found = classes(release, "models/dflash.py")
    names = ("DFlashAttention", "DFlashDecoderLayer", "DFlashDraftModel")
    norms = [
        call
        for name in names
        for call in ast.walk(found[name])
        if isinstance(call, ast.Call)
        and ast.unparse(call.func) in ("RMSNorm", "norm_cls")
    ]
    assert len(norms) == 6
    for call in norms:
        assert [ast.unparse(k.value) for k in call.keywords] == ["rms_norm_eps"]


def test_muse_glimmer_counts_capture_points() -> None:
    muse = classes("0.5.23", "models/muse_glimmer.py")["MuseGlimmerForCausalLM"]
    (hook,) = hooks(muse)
    assert "layers_to_capture = list(layer_ids)" in hook
    runner = "model_executor/model_runner_components/spec_aux_hidden_state.py"
    moved = source("0.5.23", runner)
    assert '{"DFlash2DraftModel", "MuseGlimmerAssistantModel"}' in moved
    known = target_classes()["MuseGlimmerForCausalLM"]
    assert known.rule == "capture-point"
    assert known.rule_not_for == ["DFlash2DraftModel"]


def test_text_only_qwen_3_5_counts_outputs_again() -> None:
    text = "models/qwen3_5_text.py"
    assert hooks(classes("0.5.17", text)["Qwen3_5ForCausalLM"]) == []
    (hook,) = hooks(classes("0.5.23", text)["Qwen3_5ForCausalLM"])
    assert "layer_id + 1" in hook
    assert target_classes()["Qwen3_5ForCausalLM"].dflash == "0.5.22"
