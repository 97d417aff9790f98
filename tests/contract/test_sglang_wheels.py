"""Our rules about SGLang's loader, held against the loader of real releases.

Three views of one folder have to agree: the class in the wheel (``wheels.py``), the
template's ``loader`` (``layout/loader.py``, which `verify` uses), and the judge's
serving reference, which shares no code with the template.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_file, save_file

from spec_export import cli
from spec_export.artifact.weights import WeightFiles
from spec_export.judge.reference import load_reference
from spec_export.layout.catalog import template_of_class
from spec_export.layout.landing import land
from spec_export.layout.loader import check_folder
from spec_export.layout.variables import read_variables
from tests.contract.wheels import Loaded, Wheel
from tests.helpers.field import draft_config, make_target, write_draft

DEFAULT = ("0.5.9", "0.5.17", "0.5.23")
WIDE = ("0.4.9.post6", "0.5.2", "0.5.11", "0.5.12")
RELEASES = [
    pytest.param(v, marks=[] if v in DEFAULT else [pytest.mark.wide])
    for v in sorted(DEFAULT + WIDE, key=Version)
]
CLASS = "LlamaForCausalLMEagle3"
# A draft vocabulary of a multiple of 64: older releases pad the others.
H, INNER, VOCAB, DRAFT = 8, 16, 128, 64
Tensors = dict[str, torch.Tensor]
Change = Callable[[dict[str, Any], Tensors], None]


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where sources and exports lie; each is made once and never changed."""
    return tmp_path_factory.mktemp("contract")


@cache
def wheel(version: str) -> Wheel:
    return Wheel(version)


# ------------------------------------------------------------------ what is loaded
def draft(layers: int = 1, aux: int = 3, **config: Any) -> tuple[dict, Tensors]:
    """A speculators draft: config.json and tensors, values that cannot be wrong."""
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (H, aux * H),
        "norm.weight": (H,),
        "lm_head.weight": (config.get("draft_vocab_size", DRAFT), H),
    }
    for i in range(layers):
        at, width = f"layers.{i}", 2 * H if i == 0 else H
        shapes |= {f"{at}.self_attn.{p}_proj.weight": (H, width) for p in "qkv"}
        shapes |= {
            f"{at}.self_attn.o_proj.weight": (H, H),
            f"{at}.mlp.gate_proj.weight": (INNER, H),
            f"{at}.mlp.up_proj.weight": (INNER, H),
            f"{at}.mlp.down_proj.weight": (H, INNER),
            f"{at}.input_layernorm.weight": (H,),
            f"{at}.post_attention_layernorm.weight": (H,),
        }
    shapes["layers.0.hidden_norm.weight"] = (H,)
    if config.get("norm_before_fc"):
        shapes["input_norm.weight"] = (aux * H,)
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{j}.weight": (H,) for j in range(aux)}
    torch.manual_seed(3)
    tensors: Tensors = {k: torch.rand(s).bfloat16() + 0.5 for k, s in shapes.items()}
    if config.get("draft_vocab_size", DRAFT) != VOCAB:
        tensors["d2t"] = torch.arange(DRAFT, dtype=torch.int64)
    else:
        tensors |= {"embed_tokens.weight": torch.rand(VOCAB, H).bfloat16()}
    layer = {
        "vocab_size": VOCAB,
        "num_hidden_layers": layers,
        "layer_types": ["full_attention"] * layers,
        **config.pop("layer", {}),
    }
    if aux != 3:
        config["eagle_aux_hidden_state_layer_ids"] = list(range(1, aux + 1))
    full = {"draft_vocab_size": DRAFT, **config}
    return draft_config(None, layer=layer, **full), tensors


EXPORTS: dict[str, tuple[dict, Tensors]] = {
    "1 layer": draft(),
    "1 layer, whole vocabulary": draft(draft_vocab_size=VOCAB),
    "2 layers": draft(layers=2),
    "3 layers": draft(layers=3),
    "4 auxiliary layers": draft(aux=4),
    "fc_norm": draft(fc_norm=True),
    "norm_before_fc": draft(norm_before_fc=True),
    "norm_output": draft(norm_output=True),
    "2 layers, fc_norm, norm_output": draft(layers=2, fc_norm=True, norm_output=True),
}


@cache
def export(root: Path, name: str, release: str) -> tuple[int, dict[str, Any], Path]:
    """``finalize --sglang release`` of one of the drafts."""
    target = root / "T0"
    if not target.exists():
        make_target(target, weights=False, vocab_size=VOCAB)
    config, tensors = EXPORTS[name]
    source, output = root / f"{name} source", root / f"{name} for {release}"
    if not source.exists():
        write_draft(source, config, tensors)
    stdout = io.StringIO()
    with contextlib.redirect_stdout(stdout):
        code = cli.run(
            [
                *("finalize", str(source), "--output", str(output)),
                *("--target", str(target), "--sglang", release),
                *("--plugin", "never", "--no-compare", "--json"),
            ]
        )
    return code, json.loads(stdout.getvalue()), output


def contents(folder: Path) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    config = json.loads((folder / "config.json").read_text())
    files = WeightFiles.open(folder, every_file=True)
    return config, {name: t.shape for name, t in files.tensors.items()}


# -------------------------------------------------------------- the three views
def agree(folder: Path, release: str) -> tuple[Loaded, bool]:
    """Load a folder in all three views and compare them.

    Returns:
        What the wheel made of it, and whether `verify` would say no.
    """
    config, shapes = contents(folder)
    loaded = wheel(release).load(config, shapes)
    template = template_of_class(CLASS)
    assert template is not None and template.loader is not None
    files = WeightFiles.open(folder, every_file=True)
    found = check_folder(template, config, files.tensors, Version(release))
    no = any(f.severity == "error" for f in found)
    if loaded.refused:
        assert no, (release, loaded.refused, found)
        return loaded, no
    reading = template.model_copy(update={"variables": template.loader.variables})
    values, _ = read_variables(reading, config, None, None)
    landing = land(template, values, shapes, Version(release))
    landed = {k: v for k, v in landing.landed.items() if k != "d2t"}
    assert landed == loaded.landed
    assert landing.landed.get("d2t", []) == loaded.map_from
    assert {*landing.dropped, *landing.late} == {
        n for n in loaded.dropped if "t2d" not in n
    }
    by_target = {n for n, w in landing.wanted.items() if w.origin == "target"}
    unread = {n for n, w in landing.wanted.items() if w.origin == "unread"}
    assert loaded.unset - by_target - unread == {*landing.unset} - {"d2t"}
    _reference_agrees(folder, release, loaded, unread)
    return loaded, no


def _reference_agrees(
    folder: Path, release: str, loaded: Loaded, unread: set[str]
) -> None:
    """The judge's own loader drops and misses the same names."""
    embed = torch.zeros(VOCAB, H)
    reference = load_reference(folder, embed=embed, head=embed, release=release)
    report = reference.report
    assert set(report.dropped) == {n for n in loaded.dropped if "t2d" not in n}
    missing = {_part(name) for name in report.missing}
    given = {"embed_tokens.weight", *unread}
    if json.loads((folder / "config.json").read_text()).get("draft_vocab_size") is None:
        given.add("lm_head.weight")
    assert missing == loaded.unset - given


def _part(name: str) -> str:
    """``layers.0.self_attn.qkv_proj.weight[q]`` as the checkpoint calls it."""
    match = re.fullmatch(r"(.+)\.(qkv|gate_up)_proj\.(\w+)\[(\w+)\]", name)
    return f"{match[1]}.{match[4]}_proj.{match[3]}" if match else name


def cell(loaded: Loaded) -> str:
    if loaded.refused:
        return loaded.refused.partition(":")[0]
    map_ = ["d2t"] if loaded.map_from else []
    return f"{len(loaded.landed) + len(map_)}/{len(loaded.dropped)}/{len(loaded.unset)}"


# ------------------------------------------------------------------- our own exports
@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", EXPORTS)
def test_an_export_for_a_release_lands_whole_or_is_refused(
    name: str, release: str, root: Path, table: dict[str, dict[str, str]]
) -> None:
    code, answer, output = export(root, name, release)
    row = table.setdefault(f"export: {name}", {})
    if code == 0:
        loaded, no = agree(output, release)
        assert not no and not loaded.refused
        assert not loaded.dropped
        assert loaded.unset == {
            "embed_tokens.weight",
            # Built in every layer, read in the first one.
            *(f"layers.{i}.input_layernorm.weight" for i in range(1, _layers(output))),
        }
        assert loaded.map_from == (["d2t"] if "d2t" in EXPORTS[name][1] else [])
        row[release] = cell(loaded)
        return
    codes = {f["code"] for f in answer["findings"] if f["severity"] == "error"}
    assert codes == {"release-too-old"}
    # The gate is justified: that release would not compute this draft.
    code, _, newer = export(root, name, "0.5.23")
    assert code == 0
    loaded, no = agree(newer, release)
    assert no
    ignored = not loaded.refused and not _reads(loaded, newer)
    assert loaded.refused or loaded.dropped or ignored
    row[release] = f"refused ({'ignored' if ignored else cell(loaded)})"


def _layers(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text())["num_hidden_layers"])


def _reads(loaded: Loaded, folder: Path) -> bool:
    """Whether the class knows ``norm_output``, which has no tensor of its own."""
    if not json.loads((folder / "config.json").read_text())["norm_output"]:
        return True
    return getattr(loaded.model.model, "norm_output", False) is True


# ----------------------------------------------------------- folders of other people
def rename(**renames: str) -> Change:
    """Prefixes that change; ``__`` stands for a dot."""
    table = {k.replace("__", "."): v for k, v in renames.items()}

    def change(config: dict[str, Any], tensors: Tensors) -> None:
        for name in list(tensors):
            for old, new in table.items():
                if name.startswith(old):
                    tensors[new + name.removeprefix(old)] = tensors.pop(name)
                    break

    return change


def with_config(**changes: Any) -> Change:
    def change(config: dict[str, Any], tensors: Tensors) -> None:
        config |= changes
        for key in [k for k, v in config.items() if v is ...]:
            del config[key]

    return change


def with_tensors(
    **shapes: tuple[int, ...],
) -> Change:
    """Tensors that are added; an empty shape removes one."""

    def change(config: dict[str, Any], tensors: Tensors) -> None:
        for key, shape in shapes.items():
            name = key.replace("__", ".")
            if shape:
                kind = torch.int64 if "d2t" in name else torch.bfloat16
                tensors[name] = torch.zeros(shape, dtype=kind)
            else:
                tensors.pop(name, None)

    return change


def both(
    *changes: Change,
) -> Change:
    def change(config: dict[str, Any], tensors: Tensors) -> None:
        for one in changes:
            one(config, tensors)

    return change


def fuse(config: dict[str, Any], tensors: Tensors) -> None:
    at = "midlayer."
    qkv = [tensors.pop(f"{at}self_attn.{p}_proj.weight") for p in "qkv"]
    tensors[f"{at}self_attn.qkv_proj.weight"] = torch.cat(qkv)
    gate_up = [tensors.pop(f"{at}mlp.{p}_proj.weight") for p in ("gate", "up")]
    tensors[f"{at}mlp.gate_up_proj.weight"] = torch.cat(gate_up)


LEGACY = {
    "fc_norm__0": "aux_norm_low",
    "fc_norm__1": "aux_norm_mid",
    "fc_norm__2": "aux_norm_high",
}
HAND_MADE: dict[str, tuple[str, Change]] = {
    "layers.0 names": ("1 layer", rename(midlayer__="layers.0.")),
    "model.midlayer": ("1 layer", rename(midlayer__="model.midlayer.")),
    "model.layers.0": ("1 layer", rename(midlayer__="model.layers.0.")),
    "model. before the head": ("1 layer", rename(lm_head__="model.lm_head.")),
    "model.model.": ("1 layer", rename(fc__="model.model.fc.")),
    "draft_model. before all": (
        "1 layer",
        rename(midlayer__="draft_model.midlayer.", fc__="draft_model.fc."),
    ),
    "midlayer and layers.0": (
        "1 layer",
        with_tensors(layers__0__mlp__up_proj__weight=(INNER, H)),
    ),
    "fused projections": ("1 layer", fuse),
    "q/k norms and biases": (
        "1 layer",
        with_tensors(
            midlayer__self_attn__q_norm__weight=(4,),
            midlayer__self_attn__q_proj__bias=(H,),
            midlayer__self_attn__o_proj__bias=(H,),
            midlayer__mlp__up_proj__bias=(INNER,),
        ),
    ),
    "attention_bias": (
        "1 layer",
        both(
            with_config(attention_bias=True),
            with_tensors(
                midlayer__self_attn__q_proj__bias=(H,),
                midlayer__self_attn__o_proj__bias=(H,),
            ),
        ),
    ),
    "bias": (
        "1 layer",
        both(
            with_config(bias=True),
            with_tensors(fc__bias=(H,), midlayer__self_attn__o_proj__bias=(H,)),
        ),
    ),
    "bias without tensors": ("1 layer", with_config(bias=True)),
    "verifier_norm, mask_hidden": (
        "1 layer",
        with_tensors(verifier_norm__weight=(H,), mask_hidden=(1, 1, 24)),
    ),
    "names around d2t and t2d": (
        "1 layer",
        both(
            with_tensors(t2d=(VOCAB,), my_t2d__weight=(4,), d2t=()),
            with_tensors(draft__d2t__map=(DRAFT,)),
        ),
    ),
    "t2d in the name of d2t": (
        "1 layer",
        both(with_tensors(d2t=()), with_tensors(t2d_or_d2t=(DRAFT,))),
    ),
    "no token map": ("1 layer", with_tensors(d2t=())),
    "map of a whole vocabulary": (
        "1 layer, whole vocabulary",
        with_tensors(d2t=(VOCAB,)),
    ),
    "embedding shipped": ("1 layer", with_tensors(embed_tokens__weight=(VOCAB, H))),
    "tie_word_embeddings": ("1 layer", with_config(tie_word_embeddings=True)),
    "draft_vocab_size null": (
        "1 layer, whole vocabulary",
        both(with_config(draft_vocab_size=None), with_tensors(lm_head__weight=())),
    ),
    "draft_vocab_size null, a head": (
        "1 layer, whole vocabulary",
        with_config(draft_vocab_size=None),
    ),
    "draft_vocab_size absent": ("1 layer", with_config(draft_vocab_size=...)),
    "target_hidden_size null": ("1 layer", with_config(target_hidden_size=None)),
    "no head": ("1 layer", with_tensors(lm_head__weight=())),
    "no down_proj": ("1 layer", with_tensors(midlayer__mlp__down_proj__weight=())),
    "no norms": (
        "1 layer",
        with_tensors(norm__weight=(), midlayer__hidden_norm__weight=()),
    ),
    "head of another size": ("1 layer", with_config(draft_vocab_size=32)),
    "gelu": ("1 layer", with_config(hidden_act="gelu")),
    "2 layers, verbatim norm names": (
        "2 layers",
        rename(layers__1__hidden_norm="layers.1.input_layernorm"),
    ),
    "2 layers, config says 1": ("2 layers", with_config(num_hidden_layers=1)),
    "4 features, count from the ids": (
        "4 auxiliary layers",
        with_config(num_aux_hidden_states=...),
    ),
    "4 features, count null": (
        "4 auxiliary layers",
        with_config(num_aux_hidden_states=None),
    ),
    "no eagle_config": ("1 layer", with_config(eagle_config=..., fc_norm=...)),
    "eagle_config null": ("1 layer", with_config(eagle_config=None)),
    "fc_norm by its older names": ("fc_norm", rename(**LEGACY)),
    "use_aux_norm": ("fc_norm", with_config(fc_norm=..., use_aux_norm=True)),
    "use_aux_norm, fc_norm false": (
        "fc_norm",
        with_config(fc_norm=False, use_aux_norm=True),
    ),
    "fc_norm flag false": ("fc_norm", with_config(fc_norm=False)),
    "norm_before_fc nested false": (
        "norm_before_fc",
        with_config(eagle_config={"norm_before_fc": False}),
    ),
    "norm_before_fc top level only": (
        "norm_before_fc",
        with_config(eagle_config={}),
    ),
}


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", HAND_MADE)
def test_a_folder_that_we_did_not_write(
    name: str,
    release: str,
    root: Path,
    tmp_path: Path,
    table: dict[str, dict[str, str]],
) -> None:
    base, change = HAND_MADE[name]
    code, _, made = export(root, base, "0.5.23")
    assert code == 0
    config = json.loads((made / "config.json").read_text())
    tensors = load_file(made / "model.safetensors")
    change(config, tensors)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    loaded, no = agree(tmp_path, release)
    # What is lost without a word in SGLang is an error here.
    lost = {n for n in loaded.dropped if "t2d" not in n}
    if loaded.refused or lost or loaded.unset - _harmless(config):
        assert no, (loaded.refused, lost, loaded.unset)
    table.setdefault(name, {})[release] = cell(loaded)


def _harmless(config: dict[str, Any]) -> set[str]:
    """Parameters that need no tensor: the target's, and those never read."""
    free = {"embed_tokens.weight"}
    if config.get("draft_vocab_size") is None:
        free.add("lm_head.weight")
    layers = range(1, config["num_hidden_layers"])
    return free | {f"layers.{i}.input_layernorm.weight" for i in layers}


def test_the_releases_are_those_asked_for() -> None:
    """A wheel of another release would prove nothing."""
    for version in DEFAULT:
        assert f"sglang-{version}.dist-info/METADATA" in wheel(version).files
