"""``extends``: a template that is another one with some rules changed.

The plug-in's class takes the same draft as the stock class, with a few refusals
turned into renames; written out in full, the two files would drift apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# What identifies an item of each list, so that a change finds the rule it replaces.
_IDENTITY = {
    "tensors": ("source",),
    "derived": ("name", "when"),
    "parameters": ("name",),
    "config": ("key",),
    "refuse": ("code", "subject"),
    "features": ("name",),
    "flags": ("argv",),
}


def extend(base: Mapping[str, Any], child: Mapping[str, Any]) -> dict[str, Any]:
    """Merge a template over the one that it extends.

    Mappings merge key by key (null removes one). In a list, an item with the
    identity of a base item replaces it in place, or removes it with
    ``remove: true``; any other item is added at the end.

    Args:
        base: The raw template that ``extends`` names.
        child: The raw template; ``extends`` itself is dropped.

    Returns:
        The raw merged template.

    Raises:
        ValueError: when an item to be removed is not there, or two items of the
            base could not be told apart.
    """
    merged = dict(base)
    for key, value in child.items():
        if key == "extends":
            continue
        if key in _IDENTITY and key in base:
            merged[key] = _lists(key, base[key], value)
        elif isinstance(value, Mapping) and isinstance(base.get(key), Mapping):
            merged[key] = extend(base[key], value)
        elif value is None:
            merged.pop(key, None)
        else:
            merged[key] = value
    return merged


def _lists(key: str, base: list[Any], changes: list[Any]) -> list[Any]:
    def identity(item: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(str(item.get(part)) for part in _IDENTITY[key])

    out = {identity(item): item for item in base}
    if len(out) != len(base):
        raise ValueError(f"{key}: two rules of the base have one {_IDENTITY[key]}")
    for item in changes:
        if not item.get("remove"):
            out[identity(item)] = item
        elif out.pop(identity(item), None) is None:
            raise ValueError(f"{key}: {identity(item)} is not there to be removed")
    return list(out.values())
