"""The expression language: what it computes, and that it is no more than that."""

import pytest

from spec_export.layout.expressions import ExpressionError, evaluate, fields, names

VALUES = {"H": 8, "i": 0, "flag": True, "arch": "qwen3", "ids": [1, 3]}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2 * H if i == 0 else H", 16),
        ("2 * H if i == 1 else H", 8),
        ("H // 3 + H % 3 - 1", 3),
        ("-H", -8),
        ("0 < i + 1 and i < H", True),
        ("0 < i < H", False),
        ("i >= 0 or missing", True),
        ("not flag", False),
        ("arch in ['llama', 'qwen3']", True),
        ("arch not in ('llama', 'qwen3')", False),
        ("arch != 'qwen3'", False),
        ("ids", [1, 3]),
        ("'q'", "q"),
        (7, 7),
        (False, False),
    ],
)
def test_values(text: str | int | bool, value: object) -> None:
    assert evaluate(text, VALUES) == value


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "H.bit_length()",
        "ids[0]",
        "[x for x in ids]",
        "lambda: 1",
        "H ** 9999999",
        "1 << 99999",
        "H / 2",
        "H is 8",
        "{'a': 1}",
        "f'{H}'",
        "(H := 3)",
        "H = 3",
        "1 +",
        "unknown + 1",
        "H // 0",
        "H % 0",
        "'a' - 1",
        "arch < 3",
    ],
)
def test_outside_the_language(text: str) -> None:
    with pytest.raises(ExpressionError):
        evaluate(text, VALUES)


def test_the_message_has_the_expression() -> None:
    with pytest.raises(ExpressionError, match=r"'H \+ width'.*unknown name width"):
        evaluate("H + width", VALUES)


def test_names() -> None:
    assert names("2 * H if i == 0 else W") == {"H", "i", "W"}
    assert names("'H'") == set()
    assert names(3) == set()


def test_fields_of_a_sentence() -> None:
    assert fields("is {W}, not {P}; {{braces}} stay") == {"W", "P"}
    assert fields("nothing") == set()


@pytest.mark.parametrize("text", ["{H.real}", "{ids[0]}", "{}", "{0}", "{H", "}"])
def test_a_sentence_has_plain_names_only(text: str) -> None:
    with pytest.raises(ExpressionError):
        fields(text)
