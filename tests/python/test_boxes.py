"""Boxes: what is wanted is filled exactly once, from what is held, and what nobody holds is named."""

from __future__ import annotations

import itertools
import random

from muster._boxes import Box, cover, extents, from_index, index, intersect, subtract, whole


def cells(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(start, end) for start, end in box)))


def random_box(rng: random.Random, shape: tuple[int, ...]) -> Box:
    return tuple(tuple(sorted((rng.randint(0, extent), rng.randint(0, extent)))) for extent in shape)  # type: ignore[misc]


def test_boxes_are_filled_once_and_from_the_first_that_hold_them():
    rng = random.Random(3)
    for _ in range(2000):
        shape = tuple(rng.randint(1, 5) for _ in range(rng.randint(0, 3)))
        held = {process: [random_box(rng, shape) for _ in range(rng.randint(0, 3))] for process in range(rng.randint(0, 4))}
        wanted = random_box(rng, shape)
        order = list(held)
        rng.shuffle(order)
        parts, missing = cover(wanted, held, order)
        filled = [cell for _, _, part in parts for cell in cells(part)]
        lacking = [cell for box in missing for cell in cells(box)]
        assert sorted(filled + lacking) == sorted(cells(wanted)), (wanted, held)
        for process, box, part in parts:
            assert box in held[process] and cells(part) <= cells(box)
            before = {cell for earlier in order[: order.index(process)] for of in held[earlier] for cell in cells(of)}
            assert not cells(part) & before, "a process that comes first in the order fills what it holds"
        everything = {cell for boxes in held.values() for box in boxes for cell in cells(box)}
        assert not set(lacking) & everything


def test_a_box_without_a_part_is_the_rest():
    rng = random.Random(4)
    for _ in range(2000):
        shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(0, 3)))
        box, other = random_box(rng, shape), random_box(rng, shape)
        part = intersect(box, other)
        if part is None:
            assert not cells(box) & cells(other)
            continue
        rest = [cell for piece in subtract(box, part) for cell in cells(piece)]
        assert sorted(rest) == sorted(cells(box) - cells(other))


def test_indices_and_scalars():
    assert from_index((slice(None), slice(2, 4)), (3, 8)) == ((0, 3), (2, 4))
    assert from_index((), ()) == whole(()) == ()
    assert extents(((1, 3), (2, 8))) == (2, 6)
    assert index(((2, 3), (4, 5)), ((2, 6), (1, 9))) == (slice(0, 1), slice(3, 4), ...)
    assert cover((), {1: [()]}, [1]) == ([(1, (), ())], [])
    assert cover((), {}, []) == ([], [()])
