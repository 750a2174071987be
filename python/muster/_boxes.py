"""Arithmetic with *boxes*: parts of an array, given by a start and an end in each dimension.

`cover` decides which process sends which part of a box that another process wants. The results are the same in all
processes. Begin at `cover`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Box = tuple[tuple[int, int], ...]
"""The start and the end of a part in each dimension; empty for a scalar."""


def whole(shape: Sequence[int]) -> Box:
    """Returns the box of all of an array."""
    return tuple((0, extent) for extent in shape)


def from_index(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """Returns the box that a tuple of slices without steps selects."""
    bounds = (part.indices(extent) for part, extent in zip(index, shape, strict=True))
    return tuple((start, max(start, end)) for start, end, _ in bounds)


def is_empty(box: Box) -> bool:
    return any(start >= end for start, end in box)


def extents(box: Box) -> tuple[int, ...]:
    """Returns the shape of a box."""
    return tuple(end - start for start, end in box)


def index(part: Box, of: Box) -> tuple[Any, ...]:
    """Returns the index that selects a part, as a view, in an array of NumPy that holds the box `of`."""
    # Without the ellipsis NumPy copies a scalar.
    return (*(slice(start - first, end - first) for (start, end), (first, _) in zip(part, of, strict=True)), ...)


def intersect(one: Box, other: Box) -> Box | None:
    """Returns what two boxes have in common; None if nothing."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return None if is_empty(common) else common


def subtract(box: Box, part: Box) -> list[Box]:
    """Returns disjoint boxes that are together `box` without `part`, which lies in it."""
    rest = []
    left = list(box)
    for dimension, ((start, end), (first, last)) in enumerate(zip(box, part, strict=True)):
        for piece in ((start, first), (last, end)):
            if piece[0] < piece[1]:
                rest.append((*left[:dimension], piece, *left[dimension + 1 :]))
        left[dimension] = (first, last)
    return rest


def cover(
    wanted: Box, held: Mapping[int, Iterable[Box]], order: Sequence[int]
) -> tuple[list[tuple[int, Box, Box]], list[Box]]:
    """Fills a box from what processes hold, those that come first in `order` first.

    Returns the parts, each as the process, the box of its that it is taken from, and the part itself; and what nobody holds.
    """
    parts: list[tuple[int, Box, Box]] = []
    missing = [] if is_empty(wanted) else [wanted]
    for process in order:
        for box in held.get(process, ()):
            rest: list[Box] = []
            for open_box in missing:
                part = intersect(open_box, box)
                if part is None:
                    rest.append(open_box)
                else:
                    parts.append((process, box, part))
                    rest += subtract(open_box, part)
            missing = rest
            if not missing:
                return parts, []
    return parts, missing
