"""Arrays whose elements share bytes in JAX's memory, such as arrays of int4.

JAX does not lend this memory, so transfers move packed copies of such arrays. In a copy, each byte holds as many
elements as fit, the first element in the lowest bits. NumPy makes the copies; its own arrays use a byte for each
element.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from muster._memory import check_defined, dtype_name
from muster.errors import CopyWarning

__all__ = ["Packing", "packing", "warn_of_copies"]

# The most arrays that a warning names.
_NAMED_MAX = 3


@dataclass(frozen=True)
class Packing:
    """How elements of a data type share bytes."""

    dtype: str
    count: int
    """The elements of a byte."""
    carrier: str
    """The data type under which the bytes are moved, of the same kind: peers that give int4 and uint4 are told so."""

    @property
    def _bits(self) -> int:
        return 8 // self.count

    @property
    def _mask(self) -> int:
        return (1 << self._bits) - 1

    def size(self, shape: Sequence[int]) -> int:
        """Returns the bytes of an array."""
        return -(-math.prod(shape) // self.count)

    def spread(self, array: Any) -> Any:
        """Returns the elements of an array as an array of bytes. It waits until an array of JAX is computed."""
        if isinstance(array, jax.Array):
            check_defined(array)
        return np.asarray(array).view(np.uint8) & np.uint8(self._mask)

    def gather(self, elements: Any) -> Any:
        """Returns the array of NumPy whose elements these bytes are."""
        return elements.view(jax.numpy.dtype(self.dtype))

    def pack(self, array: Any) -> Any:
        """Returns the bytes of an array, the rows of whose last dimension fill whole bytes, as the carrier."""
        elements = self.spread(array)
        elements = elements.reshape(*elements.shape[:-1], elements.shape[-1] // self.count, self.count)
        shifts = np.arange(self.count, dtype=np.uint8) * np.uint8(self._bits)
        return np.bitwise_or.reduce(elements << shifts, axis=-1).view(self.carrier)

    def unpack(self, packed: Any) -> Any:
        """Returns the array of NumPy that was packed."""
        shifts = np.arange(self.count, dtype=np.uint8) * np.uint8(self._bits)
        elements = (packed.view(np.uint8)[..., None] >> shifts) & np.uint8(self._mask)
        return self.gather(elements.reshape(*packed.shape[:-1], packed.shape[-1] * self.count))

    def pack_flat(self, array: Any) -> Any:
        """Returns the bytes of an array of any shape, as the carrier; the last one may have room left."""
        elements = np.zeros(self.size(array.shape) * self.count, np.uint8)
        elements[: array.size] = self.spread(array).reshape(-1)
        return self.pack(elements)

    def unpack_flat(self, packed: Any, shape: Sequence[int]) -> Any:
        """Returns the array of NumPy that was packed, of this shape."""
        return self.unpack(packed)[: math.prod(shape)].reshape(shape)


_PACKINGS = {
    name: Packing(name, count, carrier)
    for name, count, carrier in (
        ("int4", 2, "int8"),
        ("uint4", 2, "uint8"),
        ("int2", 4, "int8"),
        ("uint2", 4, "uint8"),
        ("float4_e2m1fn", 2, "uint8"),
    )
}


def packing(dtype: Any) -> Packing | None:
    """Returns how elements of a data type share bytes; None if each has whole bytes."""
    return _PACKINGS.get(dtype_name(dtype))


def warn_of_copies(arrays: Sequence[str], stacklevel: int) -> None:
    """Warns of these arrays, which are copied."""
    more = f" and {len(arrays) - _NAMED_MAX} more" if len(arrays) > _NAMED_MAX else ""
    text = f"elements of {', '.join(arrays[:_NAMED_MAX])}{more} share bytes, which JAX does not lend: packed copies are moved"
    warnings.warn(text, CopyWarning, stacklevel=stacklevel + 1)
