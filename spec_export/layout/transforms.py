"""Named transforms: tensors of an export that are computed, as names and shapes.

A transform is an exact rewrite: SGLang computes from the result what was trained.
What each does to the numbers is in ``artifact/transforms.py`` under the same name;
that the rewrite is exact is held by the judge against speculators' own module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Shape = tuple[int, ...]
Arguments = Mapping[str, Any]


class TransformError(ValueError):
    """A transform that does not fit its sources or arguments."""


@dataclass(frozen=True)
class Transform:
    """What a template may say of a named transform.

    Attributes:
        sources: How many source tensors it takes.
        arguments: The arguments that it has; all are needed but ``optional``.
        optional: Those that may be left out.
        result: Shape of the result from the shapes of the sources; None where only
            the rule knows it (``constant``).
    """

    sources: tuple[int, ...]
    arguments: frozenset[str]
    result: Callable[[Sequence[Shape], Arguments], Shape | None]
    optional: frozenset[str] = frozenset()


def _any(shapes: Sequence[Shape], arguments: Arguments) -> None:
    return None


def _inserted(shapes: Sequence[Shape], arguments: Arguments) -> Shape:
    """Rows and columns are put in before the given positions of the source."""
    shape = list(shapes[0])
    for axis, key in enumerate(("rows", "columns")):
        places = list(arguments.get(key, ()))
        if places and axis >= len(shape):
            raise TransformError(f"insert: a vector has no {key}")
        if any(not 0 <= place <= shape[axis] for place in places):
            raise TransformError(f"insert: {key} {places} of a tensor {shapes[0]}")
        if places:
            shape[axis] += len(places)
    return tuple(shape)


def _scattered(shapes: Sequence[Shape], arguments: Arguments) -> Shape:
    """[draft vocabulary, r] through the map -> [vocabulary, r + 1]."""
    width = shapes[0][1] if len(shapes) == 2 else 0
    return (int(arguments["vocabulary"]), width + 1)


def _taken(shapes: Sequence[Shape], arguments: Arguments) -> Shape:
    experts, width, *_ = shapes[0]
    first, last = arguments["start"], arguments["start"] + arguments["rows"]
    if not 0 <= arguments["expert"] < experts or not 0 <= first <= last <= width:
        raise TransformError(f"take-expert: {dict(arguments)} of {shapes[0]}")
    return (int(arguments["rows"]), *shapes[0][2:])


def _as_it_is(shapes: Sequence[Shape], arguments: Arguments) -> Shape:
    return tuple(shapes[0])


TRANSFORMS: dict[str, Transform] = {
    # Every element is ``value``: tables of a Markov head that biases nothing.
    "constant": Transform((0,), frozenset({"value"}), _any),
    # Rows and columns of ``value`` before positions of the source; ``values`` says
    # one for each inserted row instead. An extra rank of a Markov head.
    "insert": Transform(
        (1,),
        frozenset({"value"}),
        _inserted,
        frozenset({"rows", "columns", "values"}),
    ),
    # Every element times ``by``: exact where that is a power of two, else rounded to
    # the saved dtype once more. What a draft adds to a residual that starts scaled.
    "scale": Transform((1,), frozenset({"by"}), _as_it_is),
    # Rows of a draft vocabulary to their ids of the whole one, through ``d2t``; a last
    # column is 0 there and ``outside`` in all other rows: ids that are never drafted.
    "scatter-rows": Transform((1, 2), frozenset({"vocabulary", "outside"}), _scattered),
    # ``rows`` rows of one expert from ``start`` on, of a tensor that holds all experts.
    "take-expert": Transform((1,), frozenset({"expert", "start", "rows"}), _taken),
}


def result_shape(
    name: str, shapes: Sequence[Shape], arguments: Arguments
) -> Shape | None:
    """The shape that a transform gives.

    Args:
        name: Key of ``TRANSFORMS``.
        shapes: Of its sources, in order.
        arguments: Its arguments.

    Returns:
        The shape, None where the rule decides it.

    Raises:
        TransformError: an unknown name, wrong arguments or impossible shapes.
    """
    transform = TRANSFORMS.get(name)
    if transform is None:
        raise TransformError(f"no transform {name!r}; known: {', '.join(TRANSFORMS)}")
    if len(shapes) not in transform.sources:
        raise TransformError(f"{name} takes {transform.sources[-1]} source tensors")
    given = set(arguments)
    if not transform.arguments <= given <= transform.arguments | transform.optional:
        raise TransformError(f"{name} takes {sorted(transform.arguments)}, not {given}")
    return transform.result(shapes, arguments)


def spelled(name: str, arguments: Arguments) -> str:
    """A transform as the manifest says it: ``insert(columns=[16], value=1)``."""
    words = ", ".join(f"{key}={value}" for key, value in sorted(arguments.items()))
    return f"{name}({words})"
