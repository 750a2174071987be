"""Splits trees of arrays into their leaves, and names the leaves for messages."""

from __future__ import annotations

from typing import Any

import jax

__all__ = ["named_leaves"]


def named_leaves(tree: Any) -> tuple[list[tuple[str, Any]], Any]:
    """Returns the leaves of a tree, each with its name, such as `state['w'][0]`; and the structure of the tree."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    return [(f"state{jax.tree_util.keystr(path)}", leaf) for path, leaf in leaves], structure
