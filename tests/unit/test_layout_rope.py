"""RoPE settings against transformers' own functions and SGLang's formulas.

SGLang's side is written down here from srt/layers/rotary_embedding (yarn.py,
rope_variant.py, base.py, factory.py) of 0.5.23, independently of the layout.
"""

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from spec_export.layout.rope import RopeError, rope_settings, write_rope

HEAD = 64
MAX = 512
POSITIONS = torch.tensor([0.0, 1.0, 40.0, 333.0], dtype=torch.float64)


def _layer(rope: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    layer = {"max_position_embeddings": MAX, "head_dim": HEAD, **more}
    return layer if rope is None else {**layer, "rope_parameters": rope}


def _hf(layer: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """cos table of transformers, which is what training computes."""
    config = LlamaConfig(
        hidden_size=2 * HEAD, num_attention_heads=2, **{"head_dim": HEAD, **layer}
    )
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        theta = config.rope_parameters["rope_theta"]
        return 1.0 / theta ** (torch.arange(0, HEAD, 2).double() / HEAD), 1.0
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return frequencies.double(), float(scale)


def _sglang(theta: float, rope: dict[str, Any] | None) -> tuple[torch.Tensor, float]:
    """Inverse frequencies and magnitude of SGLang's get_rope."""
    exponent = torch.arange(0, HEAD, 2).double() / HEAD
    plain = 1.0 / theta**exponent
    if rope is None:
        return plain, 1.0
    assert "mrope_section" not in rope
    kind = rope["rope_type"] if "rope_type" in rope else rope["type"]
    if kind == "default":
        return plain, 1.0
    factor = rope["factor"]
    if kind == "linear":
        return plain / factor, 1.0  # positions are divided
    original = rope["original_max_position_embeddings"]
    if kind == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        wave = 2 * math.pi / plain
        smooth = (original / wave - low) / (high - low)
        between = (1 - smooth) * plain / factor + smooth * plain
        out = torch.where(wave > original / low, plain / factor, between)
        return torch.where(wave < original / high, plain, out), 1.0
    assert kind == "yarn"

    def dimension(rotations: float) -> float:
        top = HEAD * math.log(original / (rotations * 2 * math.pi))
        return top / (2 * math.log(theta))

    first = dimension(rope.get("beta_fast", 32))
    last = dimension(rope.get("beta_slow", 1))
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, HEAD - 1)
    last += 0.001 * (first == last)
    ramp = ((torch.arange(HEAD // 2).double() - first) / (last - first)).clamp(0, 1)
    frequencies = plain / factor * ramp + plain * (1 - ramp)

    def magnitude(by: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0

    scale = magnitude(1.0)
    if rope.get("mscale") is not None and rope.get("mscale_all_dim") is not None:
        scale = magnitude(rope["mscale"]) / magnitude(rope["mscale_all_dim"])
    return frequencies, scale * rope.get("attn_factor", 1.0)


def _same(a: tuple[torch.Tensor, float], b: tuple[torch.Tensor, float]) -> bool:
    """Whether both rotate alike: angle and magnitude at some positions."""
    left, right = (torch.outer(POSITIONS, x[0]).cos() * x[1] for x in (a, b))
    return torch.allclose(left, right, atol=2e-4, rtol=0)


def _readers(layer: dict[str, Any]) -> dict[str, tuple[torch.Tensor, float]]:
    """What each reader of the written file computes."""
    out = write_rope(layer)
    only_new = {"rope_parameters": out["rope_parameters"]}
    only_old: dict[str, Any] = {
        k: out[k] for k in ("rope_theta", "rope_scaling") if k in out
    }
    size = {"max_position_embeddings": MAX}
    new = out["rope_parameters"]
    return {
        "SGLang >= 0.5.10": _sglang(new["rope_theta"], new),
        "SGLang < 0.5.10": _sglang(out["rope_theta"], out.get("rope_scaling")),
        "transformers, both": _hf({**out, **size}),
        "transformers, rope_parameters": _hf({**only_new, **size}),
        "transformers, rope_scaling": _hf({**only_old, **size}),
    }


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
CASES = {
    "default": _layer({"rope_type": "default", "rope_theta": 1e6}),
    "default, integer theta": _layer({"rope_type": "default", "rope_theta": 10000}),
    "linear": _layer({"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
    "llama3": _layer(LLAMA3),
    "llama3, no original": _layer({**LLAMA3, "original_max_position_embeddings": None}),
    "llama3, original beside": _layer(LLAMA3, original_max_position_embeddings=256),
    "yarn": _layer(YARN),
    "yarn, no original": _layer({**YARN, "original_max_position_embeddings": None}),
    "yarn, original beside": _layer(YARN, original_max_position_embeddings=64),
    "yarn, attention_factor": _layer({**YARN, "attention_factor": 1.7}),
    "yarn, attention_factor 1": _layer({**YARN, "attention_factor": 1.0}),
    "yarn, mscale": _layer({**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}),
    "yarn, mscale alone": _layer({**YARN, "mscale": 0.7}),
    "yarn, both": _layer(
        {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3, "attention_factor": 0.9}
    ),
    "yarn, betas": _layer({**YARN, "beta_fast": 16, "beta_slow": 2}),
    "yarn, not truncated": _layer({**YARN, "truncate": False}),
    "yarn, factor 1": _layer({**YARN, "factor": 1.0, "attention_factor": 1.2}),
    "old, default": _layer(None, rope_theta=1e6),
    "old, yarn": _layer(
        None,
        rope_theta=5e5,
        rope_scaling={k: v for k, v in YARN.items() if k != "rope_theta"},
    ),
    "old, type": _layer(
        None, rope_theta=1e4, rope_scaling={"type": "linear", "factor": 2.0}
    ),
    "per layer type": _layer(
        {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        }
    ),
}


def _trained(layer: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """What training computed: transformers over what it was given."""
    layer = dict(layer)
    rope = layer.get("rope_parameters")
    if rope is not None:
        rope = rope.get("sliding_attention", rope)
        rope = {k: v for k, v in rope.items() if v is not None}
        layer["rope_parameters"] = rope
    return _hf(layer)


@pytest.mark.parametrize("case", CASES)
def test_every_reader_computes_what_was_trained(case: str) -> None:
    trained = _trained(CASES[case])
    for reader, computed in _readers(CASES[case]).items():
        assert _same(trained, computed), reader


def test_the_comparison_sees_an_unfolded_attention_factor() -> None:
    # The control: the settings as transformers has them, which SGLang reads amiss.
    raw = CASES["yarn, attention_factor"]["rope_parameters"]
    assert not _same(_trained(CASES["yarn, attention_factor"]), _sglang(5e5, raw))
    assert not _same(_trained(CASES["yarn"]), _sglang(1e4, YARN))


def test_plain_rope_has_no_rope_scaling() -> None:
    out = write_rope(_layer({"rope_type": "default", "rope_theta": 1e6}))
    assert out["rope_theta"] == 1e6
    assert "rope_scaling" not in out


def test_plain_yarn_needs_no_attention_factor() -> None:
    scaling = write_rope(_layer(YARN))["rope_scaling"]
    assert not {"attn_factor", "attention_factor"} & set(scaling)
    assert scaling["type"] == scaling["rope_type"] == "yarn"


@pytest.mark.parametrize("kind", ["default", "mrope"])
def test_mrope_is_dropped(kind: str) -> None:
    left = {
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
        "rope_type": kind,
        "rope_theta": 1e6,
    }
    out = write_rope(_layer(left))
    assert out == {
        "rope_theta": 1e6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "dynamic"),
        ({"rope_type": "longrope", "short_factor": [1.0], "factor": 2.0}, "longrope"),
        ({"rope_type": "proportional"}, "proportional"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_fac"),
        ({"rope_type": "yarn"}, "factor"),
        ({**YARN, "factor": "4"}, "factor"),
        ({**YARN, "factor": True}, "factor"),
        ({**YARN, "attention_factor": "x"}, "attention_factor"),
        ({**YARN, "attention_factor": float("nan")}, "attention_factor"),
        ({**YARN, "mscale": "x", "mscale_all_dim": 1.0}, "mscale"),
        ({**YARN, "alpha": 3}, "alpha"),
        ({**LLAMA3, "low_freq_factor": None}, "low_freq_factor"),
        ({**YARN, "rope_theta": 0.0}, "rope_theta"),
        ({**YARN, "rope_theta": float("inf")}, "rope_theta"),
        ({**YARN, "rope_theta": True}, "rope_theta"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention"),
        ("linear", "linear"),
    ],
)
def test_refused(rope: Any, words: str) -> None:
    full = {"rope_theta": 1e4, **rope} if isinstance(rope, dict) else rope
    with pytest.raises(RopeError, match=words):
        write_rope(_layer(full))


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "default"}},
    ],
)
def test_theta_is_never_a_default(more: dict[str, Any]) -> None:
    with pytest.raises(RopeError, match="rope_theta is None"):
        write_rope(_layer(None, **more))


def test_partial_rotation_beside_the_mapping_is_refused() -> None:
    # transformers moves it into rope_parameters, so it was trained with.
    layer = _layer(
        {"rope_type": "default", "rope_theta": 1e4}, partial_rotary_factor=0.5
    )
    with pytest.raises(RopeError, match="partial_rotary_factor"):
        write_rope(layer)
    assert write_rope({**layer, "partial_rotary_factor": 1.0})


def test_settings_do_not_touch_the_source() -> None:
    layer = _layer(dict(YARN))
    write_rope(layer)
    assert layer["rope_parameters"] == YARN
    assert rope_settings(layer) is not layer["rope_parameters"]


def test_unknown_keys_of_plain_rope_do_no_harm() -> None:
    layer = _layer({"rope_type": "default", "rope_theta": 1e4, "factor": 2.0})
    assert write_rope(layer)["rope_parameters"].keys() == {"rope_type", "rope_theta"}
    assert _same(_hf(layer), _sglang(1e4, None))


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_the_factor_is_written_as_a_float(kind: str) -> None:
    # LinearScalingRotaryEmbedding iterates over anything that is no float.
    out = write_rope(_layer({"rope_type": kind, "rope_theta": 1e4, "factor": 4}))
    assert type(out["rope_parameters"]["factor"]) is float
    assert type(out["rope_scaling"]["factor"]) is float
