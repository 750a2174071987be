"""Memory that arrays and transfers share without a copy.

A `Buffer` is memory of the transfer engine. Bytes that are received into it can be used in place as an array of JAX
or NumPy. A *source* is the memory of an array of any library, from which a transfer sends. The memory is borrowed
by DLPack or by the buffer protocol. So the library keeps it until the transfer is over, even if the program drops
the array meanwhile.

This file needs neither JAX nor NumPy. It imports them only if the program has imported them, or asks for an array
of JAX.
"""

from __future__ import annotations

import contextlib
import operator
import sys
import time
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from muster import _native
from muster.errors import ArrayDeleted, ArrayMemoryError, ComputationFailed, CopyWarning

if TYPE_CHECKING:
    import jax

__all__ = ["Buffer", "empty", "source"]

# The device type of host memory, and the version of DLPack that is asked for.
_CPU = 1
_DLPACK = (1, 0)

# The formats of the buffer protocol and their data types, where the size of an element leaves a choice.
_FORMATS = {
    "?": "bool",
    **dict.fromkeys("bhilqn", "int"),
    **dict.fromkeys("BHILQNc", "uint"),
    **dict.fromkeys("efd", "float"),
    "Zf": "complex",
    "Zd": "complex",
}


# The data types of JAX that were found to be usable. To name a data type takes longer than to look it up.
_dtypes_of_jax: set[Any] = set()

# The names of the data types that were used.
_dtype_names: dict[Any, str] = {}
_DTYPE_NAMES_MAX = 1024

# The data types that JAX converts to those of half the size, unless `jax_enable_x64` is on.
WIDE = frozenset({"int64", "uint64", "float64", "complex128"})

# The longest that the end of the interpreter waits for computations of JAX.
_COMPUTATIONS_WAIT_S = 60.0


class Buffer(_native.Buffer):
    """Memory of the transfer engine with a shape and a data type. `muster.empty()` makes one.

    It is used without a copy by `array()`, `jax.dlpack.from_dlpack(buffer)`, `numpy.from_dlpack(buffer)`,
    `numpy.asarray(buffer)` and `memoryview(buffer)`, which views a data type that it does not know (bfloat16, float8) as bytes.
    Each of them holds an export of the Buffer. While there are `exports`, transfers may send the Buffer, and a receive into
    it is an ArrayMemoryError: nothing changes what an array shows.
    """

    __slots__ = ()

    def array(self) -> jax.Array:
        """Returns an array of JAX that shares the memory, on the local CPU device `device`.

        It has the shape and the data type of the Buffer. A CopyWarning says so if JAX has made a copy, as it does of 64-bit
        types unless `jax_enable_x64` is on. Nobody may write the Buffer while the array lives.
        """
        # Programs that use this package together with JAX have loaded it.
        internals: Any = None if self.dtype in WIDE else sys.modules.get("muster.jax._internals")
        made: Any = None if internals is None else internals.array_over(self)
        array: jax.Array = _array_by_dlpack(self) if made is None else made
        if self.nbytes > 0 and array.unsafe_buffer_pointer() != self.address:
            why = f"JAX has made it {array.dtype}" if str(array.dtype) != self.dtype else "JAX has not said why"
            warnings.warn(f"the array is a copy of the Buffer ({self.dtype}): {why}", CopyWarning, stacklevel=2)
        return array


def _array_by_dlpack(buffer: Buffer) -> jax.Array:
    import jax.dlpack

    array: jax.Array = jax.dlpack.from_dlpack(buffer)
    return array


def empty(shape: int | Sequence[int], dtype: Any, device: int = 0) -> Buffer:
    """Returns a Buffer with whatever its memory held before.

    Args:
        shape: the size of each dimension, or of the only one.
        dtype: a data type of JAX or NumPy, or its name; `bfloat16` and `float8_e4m3fn` are names, too.
        device: the local CPU device on which JAX sees it: an index of `jax.local_devices(backend="cpu")`.

    Raises:
        ArrayMemoryError: the memory cannot be had, or elements of the data type share bytes, as those of int4.
    """
    sizes = [shape] if isinstance(shape, int) else [operator.index(size) for size in shape]
    if min(sizes, default=0) < 0:
        raise ArrayMemoryError(f"the shape {tuple(sizes)} has a negative size")
    return Buffer(sizes, dtype_name(dtype), device)


def dtype_name(dtype: Any) -> str:
    """Returns JAX's name of a data type."""
    if isinstance(dtype, str):
        return dtype
    # NumPy makes the name anew each time, which takes longer than to look it up.
    try:
        return _dtype_names[dtype]
    except (KeyError, TypeError):
        pass
    # An instance has a name (numpy.dtype("float32")), and a class is called by it (jax.numpy.float32).
    found = getattr(dtype, "name", None)
    name = found if isinstance(found, str) else str(getattr(dtype, "__name__", dtype)).rstrip("_")
    if len(_dtype_names) >= _DTYPE_NAMES_MAX:
        _dtype_names.clear()
    # What is no data type may not be hashable; it is refused by its name.
    with contextlib.suppress(TypeError):
        _dtype_names[dtype] = name
    return name


def source(value: Any) -> _native.Source:
    """Returns the memory of an array for a transfer to send.

    It waits until an array of JAX is defined, and lets other threads run meanwhile. NumPy's arrays and other memory that can be
    written must not be written while a transfer sends them.

    Args:
        value: an array of JAX on one CPU device (of others, its `addressable_shards[i].data`), a Buffer, an array of NumPy,
            or anything with DLPack or the buffer protocol.

    Raises:
        ArrayDeleted: the array was deleted or donated.
        ArrayMemoryError: there is no memory that can be sent as it is; the message says what to do.
        ComputationFailed: the computation of the array has failed.
    """
    if isinstance(value, _native.Buffer):
        return _native.Source.of(value)
    jax, numpy = sys.modules.get("jax"), sys.modules.get("numpy")
    if jax is not None and isinstance(value, getattr(jax, "Array", ())):
        check_concrete(value, jax)
        return source_of_jax(value)
    if numpy is not None and isinstance(value, getattr(numpy, "ndarray", ())):
        return _of_numpy(value, numpy)
    if hasattr(value, "__dlpack__"):
        return _of_dlpack(value)
    return _of_buffer(value)


def plain_dtype_name(dtype: Any) -> str | None:
    """Returns the name of a data type that `check_plain_dtype()` has accepted; None if it has not, or not yet."""
    return dtype_name(dtype) if dtype in _dtypes_of_jax else None


def check_plain_dtype(dtype: Any) -> None:
    """Refuses a data type that JAX does not have, or whose elements share bytes."""
    if dtype not in _dtypes_of_jax:
        _native.check_dtype(dtype_name(dtype))
        _dtypes_of_jax.add(dtype)


def source_of_jax(array: Any) -> _native.Source:
    """Returns the memory of an array of JAX that `check_concrete()` has not refused, as `source()` does."""
    devices = array.sharding.device_set
    if len(devices) != 1:
        raise ArrayMemoryError(
            f"the array is on {len(devices)} devices, and each has memory of its own: go by its shards, "
            "[shard.data for shard in x.addressable_shards]"
        )
    [device] = devices
    if device.platform != "cpu":
        raise ArrayMemoryError(f"the array is on {device}, not in memory of the host: copy it there first, jax.device_get(x)")
    check_plain_dtype(array.dtype)
    # __dlpack__() waits, too, but holds the GIL meanwhile in JAX 0.6.2.
    check_defined(array)
    try:
        return _native.Source.from_dlpack(_capsule(array))
    except ArrayMemoryError:
        raise
    except RuntimeError as error:
        if array.is_deleted():
            raise deleted(array) from None
        raise ArrayMemoryError(f"JAX does not lend the memory of the array: {error}; pass jax.numpy.copy(x)") from error


def check_concrete(array: Any, jax: Any) -> None:
    """Refuses an array that is traced, and one of keys."""
    if isinstance(array, jax.core.Tracer):
        raise ArrayMemoryError("inside jit an array has no memory: call this outside of it, with the result")
    if array.dtype not in _dtypes_of_jax and jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
        raise ArrayMemoryError(f"an array of {array.dtype} has no memory of its own: pass jax.random.key_data(x)")


def check_defined(array: Any) -> None:
    """Waits until an array of JAX is defined."""
    try:
        array.block_until_ready()
    except RuntimeError as error:
        if array.is_deleted():
            raise deleted(array) from None
        raise ComputationFailed(f"the computation of the array has failed: {error}") from error


def finish_computations() -> None:
    """Waits until the arrays of JAX are defined; called when the interpreter ends.

    The CPU client of JAX waits for its computations when its last array is freed. An array whose memory DLPack has lent is not
    always freed when the interpreter ends, and JAX before 0.9 then frees compiled programs that still run: SIGSEGV.
    """
    jax, bridge = sys.modules.get("jax"), sys.modules.get("jax._src.xla_bridge")
    if jax is None or getattr(jax, "__version_info__", (0, 9)) >= (0, 9):
        return
    # A question about arrays would start a backend, which may wait for other processes.
    if not getattr(bridge, "backends_are_initialized", bool)():
        return
    arrays, end = jax.live_arrays(), time.monotonic() + _COMPUTATIONS_WAIT_S
    while any(_native.is_ready(array) is False for array in arrays) and time.monotonic() < end:
        time.sleep(0.001)


def deleted(array: Any) -> ArrayDeleted:
    """Returns the exception for an array that has no memory any more."""
    return ArrayDeleted(
        f"the array ({array.dtype}{list(array.shape)}) was deleted, or donated to a computation: pass its result, or do not donate it"
    )


def target(value: Any) -> _native.Target | _native.Buffer:
    """Returns the memory that a transfer receives into.

    Args:
        value: a Buffer, or a NumPy array or anything else whose memory can be written by the buffer protocol.

    Raises:
        ArrayMemoryError: there is no memory that can be received into; the message says what to do.
    """
    if isinstance(value, _native.Buffer):
        return value
    jax, numpy = sys.modules.get("jax"), sys.modules.get("numpy")
    if jax is not None and isinstance(value, getattr(jax, "Array", ())):
        raise ArrayMemoryError("an array of JAX never changes: receive into muster.empty(x.shape, x.dtype), or into jax.ShapeDtypeStruct(...)")
    is_numpy = numpy is not None and isinstance(value, getattr(numpy, "ndarray", ()))
    view, shape, name = _numpy_bytes(value, numpy) if is_numpy else _view(value)
    if memoryview(view).readonly:
        raise ArrayMemoryError(f"the memory of this {type(value).__name__} is read-only: receive into a bytearray, a NumPy array or a Buffer")
    return _native.Target.from_buffer(view, shape, name)


def _of_numpy(array: Any, numpy: Any) -> _native.Source:
    return _native.Source.from_buffer(*_numpy_bytes(array, numpy))


def _numpy_bytes(array: Any, numpy: Any) -> tuple[Any, list[int], str]:
    """Returns the bytes of an array of NumPy, which are not copied, its shape, and its data type."""
    if not array.flags.c_contiguous:
        raise ArrayMemoryError(
            "the elements of the array are not contiguous in row-major order: pass numpy.ascontiguousarray(x), which copies it"
        )
    if not array.dtype.isnative:
        raise ArrayMemoryError(f"the bytes of {array.dtype!r} are in another order: pass x.astype(x.dtype.newbyteorder('='))")
    name = dtype_name(array.dtype)
    _native.check_dtype(name)
    # Not every data type of JAX has a format in the buffer protocol. Their bytes have, and NumPy does not copy them.
    return array.reshape(-1).view(numpy.uint8), list(array.shape), name


def _of_dlpack(value: Any) -> _native.Source:
    kind, number = value.__dlpack_device__()
    if int(kind) != _CPU:
        raise ArrayMemoryError(f"the memory is on device {number} of type {int(kind)}, not on the host: copy it there first")
    return _native.Source.from_dlpack(_capsule(value))


def _capsule(value: Any) -> Any:
    """Returns the capsule of DLPack by which an object lends its memory."""
    try:
        return value.__dlpack__(max_version=_DLPACK)
    except TypeError:
        # From before DLPack 1.0.
        return value.__dlpack__()


def _of_buffer(value: Any) -> _native.Source:
    return _native.Source.from_buffer(*_view(value))


def _view(value: Any) -> tuple[memoryview, list[int], str]:
    """Returns the memory of an object by the buffer protocol, its shape, and its data type."""
    try:
        view = memoryview(value)
    except TypeError:
        raise ArrayMemoryError(
            f"a {type(value).__name__} lends no memory: pass an array of JAX or NumPy, a muster.Buffer, or an object with "
            "__dlpack__ or the buffer protocol"
        ) from None
    if not view.c_contiguous:
        raise ArrayMemoryError("the memory is not contiguous in row-major order: pass a copy, bytes(x)")
    kind = _FORMATS.get(view.format.lstrip("@=" + ("<" if sys.byteorder == "little" else ">")))
    if kind is None:
        raise ArrayMemoryError(f"the format {view.format!r} is no data type of JAX: pass memoryview(x).cast('B')")
    name = kind if kind == "bool" else f"{kind}{8 * view.itemsize}"
    return view, list(view.shape or ()), name
