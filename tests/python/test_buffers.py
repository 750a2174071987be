"""Memory between arrays and transfers: nothing is copied, everything is kept as long as it is used, and freed afterwards."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from conftest import PATIENCE_S, TARGET, TOOLS, clean_environment, outer_releases

import muster
from muster import _native

# Every program begins with this: three CPU devices, and DLPack by hand.
COMMON = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=3"
import ctypes, gc, random, sys, threading, time, warnings
import jax, jax.numpy as jnp, numpy as np
import muster
from muster import _native
from muster._memory import source
warnings.filterwarnings("ignore", category=UserWarning, message=".*donated.*")

class Device(ctypes.Structure): _fields_ = [("kind", ctypes.c_int32), ("id", ctypes.c_int32)]
class Type(ctypes.Structure): _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]
class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device", Device), ("ndim", ctypes.c_int32), ("dtype", Type),
                ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)), ("offset", ctypes.c_uint64)]
DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
class Plain(ctypes.Structure): _fields_ = [("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", DELETER)]
class Versioned(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p), ("deleter", DELETER),
                ("flags", ctypes.c_uint64), ("tensor", Tensor)]
api = ctypes.pythonapi
api.PyCapsule_New.restype = ctypes.py_object
api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
api.PyCapsule_GetPointer.restype = ctypes.c_void_p
api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]

def ints(values): return (ctypes.c_int64 * max(len(values), 1))(*values)

class Exporter:
    "Lends memory by DLPack, and counts how often it is given back."
    def __init__(self, shape=(4,), code=2, bits=32, *, lanes=1, strides=None, kind=1, version=None, name=None, data=None, offset=0, ndim=None):
        self.memory = np.arange(64, dtype=np.uint8)
        self.freed = 0
        self.threads = set()
        self.version, self.name = version, name
        self.shape, self.strides = ints(shape), None if strides is None else ints(strides)
        self.tensor = Tensor(self.memory.ctypes.data if data is None else data, Device(kind, 0), len(shape) if ndim is None else ndim,
                             Type(code, bits, lanes), self.shape, self.strides, offset)
        def free(_):
            self.freed += 1
            self.threads.add(threading.current_thread())
        self.free = DELETER(free)
    def __dlpack_device__(self): return (1, 0)
    def __dlpack__(self, **asked):
        self.asked = asked
        if self.version is None:
            self.managed = Plain(self.tensor, None, self.free)
        else:
            self.managed = Versioned(self.version, 0, None, self.free, 1, self.tensor)
        name = self.name or (b"dltensor" if self.version is None else b"dltensor_versioned")
        return api.PyCapsule_New(ctypes.addressof(self.managed), name, None)

def until(holds, what, seconds=60):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, what
        gc.collect()
        time.sleep(0.01)

def pointer(array): return array.addressable_shards[0].data.unsafe_buffer_pointer()
def raises(kind, text, call):
    try:
        call()
    except kind as error:
        assert text in str(error), (text, str(error))
        return error
    raise AssertionError(f"no {kind.__name__}: {text}")
def resident():
    with open("/proc/self/statm") as file: return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
slow = jax.jit(lambda x: jax.lax.fori_loop(0, 60, lambda i, y: jnp.tanh(y @ y), x))
ones = jnp.full((500, 500), 1e-3)
slow(ones).block_until_ready()
"""

DTYPES = (
    "bool int8 int16 int32 uint8 uint16 uint32 float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2 "
    "float8_e5m2fnuz float8_e8m0fnu float16 bfloat16 float32 complex64"
).split()


def run(scene, release, code: str, *arguments: str) -> str:
    text = scene.python(release, COMMON + code, *arguments).succeed()
    assert text.endswith("DONE"), text
    return text


@pytest.mark.parametrize("way", ["muster", "muster.jax"])
def test_arrays_share_the_memory_of_buffers(scene, release, way):
    code = """
import importlib, ml_dtypes
# With muster.jax an array is made without jax.dlpack, which would take most of the time.
importlib.import_module(sys.argv[2])
asked, from_dlpack = [], jax.dlpack.from_dlpack
def counted(value):
    asked.append(value)
    return from_dlpack(value)
jax.dlpack.from_dlpack = counted
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
for device, name in enumerate(sys.argv[1].split()):
    device %= 3
    dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
    buffer = muster.empty((3, 5), name, device)
    assert (buffer.shape, buffer.dtype, buffer.nbytes, buffer.device) == ((3, 5), name, 15 * dtype.itemsize, device), buffer
    assert buffer.address % 64 == 0 and buffer.exports == 0
    values = np.arange(15).reshape(3, 5).astype(dtype)
    view = np.frombuffer(buffer, np.uint8)
    assert view.ctypes.data == buffer.address and buffer.exports == 1
    view[:] = values.reshape(-1).view(np.uint8)
    array = buffer.array()
    assert array.dtype == dtype and array.shape == (3, 5) and list(array.devices()) == [jax.devices()[device]], array
    same = from_dlpack(buffer)
    assert (array.aval, array.sharding, array.committed) == (same.aval, same.sharding, same.committed), (array, same)
    del same
    assert pointer(array) == buffer.address, name
    assert bytes(np.asarray(array).reshape(-1).view(np.uint8)) == values.tobytes(), name
    # It is the same memory: what is written now shows.
    view[:] = np.roll(values, 1).reshape(-1).view(np.uint8)
    assert bytes(np.asarray(array).reshape(-1).view(np.uint8)) == np.roll(values, 1).tobytes(), name
    del array, view
    until(lambda: buffer.exports == 0, name)
assert len(asked) == (0 if sys.argv[2] == "muster.jax" else len(sys.argv[1].split())), asked
# Other ways in, and views with shape and type.
buffer = muster.empty((4, 6), jnp.float32)
view = np.asarray(buffer)
assert view.shape == (4, 6) and view.dtype == np.float32 and view.flags.writeable and view.ctypes.data == buffer.address
view[:] = 7
for array in (jax.dlpack.from_dlpack(buffer), np.from_dlpack(buffer), jax.device_put(view)):
    at = pointer(array) if isinstance(array, jax.Array) else array.ctypes.data
    assert at == buffer.address and float(array.sum()) == 168.0
assert memoryview(muster.empty(3, "bfloat16")).shape == (6,) and memoryview(muster.empty((), np.float64)).shape == ()
assert muster.empty(0, "int8").array().shape == (0,) and muster.empty((2, 0), "bfloat16").array().shape == (2, 0)
assert muster.empty(3, np.dtype("int16")).dtype == "int16" and muster.empty(3, bool).dtype == "bool"
# One array over several devices and Buffers.
parts = [muster.empty((2, 3), "float32", device) for device in range(3)]
for number, part in enumerate(parts): np.asarray(part)[:] = number
sharding = NamedSharding(Mesh(np.array(jax.devices()), "x"), P("x"))
whole = jax.make_array_from_single_device_arrays((6, 3), sharding, [part.array() for part in parts])
assert [shard.data.unsafe_buffer_pointer() for shard in whole.addressable_shards] == [part.address for part in parts]
assert float(whole.sum()) == 18.0
# A copy that JAX makes is announced.
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    assert str(muster.empty(4, "int64").array().dtype) == "int32"
assert any(issubclass(w.category, muster.CopyWarning) and "int64" in str(w.message) for w in told), told
jax.config.update("jax_enable_x64", True)
with warnings.catch_warnings():
    warnings.simplefilter("error")
    for name in ("int64", "uint64", "float64", "complex128"):
        buffer = muster.empty(4, name)
        assert pointer(buffer.array()) == buffer.address and np.asarray(buffer).dtype == name and str(buffer.array().dtype) == name
print("DONE")
"""
    run(scene, release, code, " ".join(DTYPES), way)


def test_transfers_read_the_memory_of_arrays(scene, release):
    code = """
import array as arrays, ml_dtypes, mmap
def same(value, address, shape, dtype, contents):
    found = source(value)
    assert (found.shape, found.dtype, found.nbytes) == (shape, dtype, len(contents)), (found.shape, found.dtype)
    assert found.address == address and found.tobytes() == contents, (value, found.tobytes())
for name in sys.argv[1].split():
    values = np.arange(15).reshape(3, 5).astype(np.dtype(getattr(ml_dtypes, name, None) or name))
    array = jnp.asarray(values)
    same(array, pointer(array), (3, 5), name, values.tobytes())
    same(values, values.ctypes.data, (3, 5), name, values.tobytes())
    same(values[1:], values[1:].ctypes.data, (2, 5), name, values[1:].tobytes())
    same(values[0, 1, ...], values[0, 1, ...].ctypes.data, (), name, values[0, 1].tobytes())
scalar = jnp.float32(3.0)
same(scalar, pointer(scalar), (), "float32", np.float32(3.0).tobytes())
assert source(jnp.zeros((0, 3))).shape == (0, 3) and source(jnp.zeros((0, 3))).tobytes() == b""
read_only = np.arange(4.0); read_only.flags.writeable = False
same(read_only, read_only.ctypes.data, (4,), "float64", read_only.tobytes())
buffer = muster.empty(4, "int32")
np.asarray(buffer)[:] = 5
same(buffer, buffer.address, (4,), "int32", np.full(4, 5, np.int32).tobytes())
assert buffer.exports == 0
memory = mmap.mmap(-1, 4096)
memory[:3] = b"abc"
for value, shape, dtype in ((b"text", (4,), "uint8"), (bytearray(b"text"), (4,), "uint8"), (memory, (4096,), "uint8"),
                            (arrays.array("d", [1, 2]), (2,), "float64"), (memoryview(b"abcd").cast("i"), (1,), "int32"),
                            (memoryview(np.ones((2, 3), np.complex64)), (2, 3), "complex64"), ((ctypes.c_int64 * 2)(1, 2), (2,), "int64")):
    found = source(value)
    assert (found.shape, found.dtype, found.tobytes()) == (shape, dtype, memoryview(value).tobytes()), (found.shape, found.dtype)
del found, value
# The loan of a view keeps its object from being closed or resized.
held = source(memory)
raises(BufferError, "", memory.close)
del held
def closes():
    try: memory.close()
    except BufferError: return False
    return True
until(closes, "the memory is given back")
# Both kinds of capsules, with an offset, and with strides that say the same.
for exporter, shape in ((Exporter(), (4,)), (Exporter(version=1), (4,)), (Exporter((2, 2), offset=16), (2, 2)),
                        (Exporter((2, 1, 2), strides=(2, 77, 1), version=1), (2, 1, 2)), (Exporter((), 5, 64), ()), (Exporter((0,), data=0), (0,))):
    found = source(exporter)
    start = exporter.tensor.offset
    assert found.shape == shape and found.tobytes() == bytes(exporter.memory[start:start + found.nbytes]), exporter
    assert exporter.asked == {"max_version": (1, 0)} and exporter.freed == 0
    # The thread that lets go gives it back, at once, and an exception that is on its way stays.
    def fail():
        held = found.pop()
        raise KeyError(held.nbytes)
    found = [found]
    try: fail()
    except KeyError as error: error.__traceback__ = None
    assert exporter.freed == 1 and exporter.threads == {threading.main_thread()}, "given back once"
class Old(Exporter):
    def __dlpack__(self, stream=None): return super().__dlpack__()
assert source(Old()).shape == (4,)
# Arrays that cannot be sent as they are, and the advice in the error.
mesh = jax.sharding.Mesh(np.array(jax.devices()), "x")
sharded = jax.device_put(np.zeros(6, np.float32), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x")))
assert [source(shard.data).address for shard in sharded.addressable_shards] == [shard.data.unsafe_buffer_pointer() for shard in sharded.addressable_shards]
refused = [
    (sharded, "addressable_shards"), (jnp.arange(8, dtype=jnp.int4), "bitcast_convert_type"), (jnp.arange(8, dtype=jnp.uint4), "bitcast_convert_type"),
    (np.arange(8).astype(ml_dtypes.int4), "bitcast_convert_type"), (jax.random.key(0), "key_data"), (np.zeros((4, 4)).T, "ascontiguousarray"),
    (np.zeros(8)[::2], "ascontiguousarray"), (np.zeros(3, ">f4"), "newbyteorder"), (np.array(["a"]), "no data type"), (np.array([None]), "object"),
    (np.zeros(2, "M8[s]"), "datetime64"), (memoryview(bytearray(8))[::2], "contiguous"), (7, "lends no memory"), (None, "lends no memory"),
]
for value, text in refused: raises(muster.ArrayMemoryError, text, lambda: source(value))
jax.jit(lambda x: (raises(muster.ArrayMemoryError, "outside", lambda: source(x)), x)[1])(ones)
# Packed elements go as bytes, and come back.
packed = jnp.arange(12, dtype=jnp.int4).reshape(3, 4)
plain = jax.lax.bitcast_convert_type(packed.reshape(-1, 2), jax.numpy.uint8)
assert source(plain).nbytes == 6 and (jax.lax.bitcast_convert_type(plain, jnp.int4).reshape(3, 4) == packed).all()
# Exporters that lie are refused, and get everything back.
for exporter, text in ((Exporter(strides=(2,)), "contiguous"), (Exporter((2, 2), strides=(1, 2)), "contiguous"), (Exporter(lanes=4), "data type"),
                       (Exporter(code=99), "data type"), (Exporter(code=0, bits=4), "data type"), (Exporter(bits=33), "data type"), (Exporter((-4,)), "negative"),
                       (Exporter(ndim=10**6), "dimensions"), (Exporter(ndim=-1), "dimensions"), (Exporter((2**62, 2**62)), "address space"),
                       (Exporter((2**61,)), "address space"), (Exporter(data=0), "null"), (Exporter(offset=2), "aligned"), (Exporter(kind=2), "host"),
                       (Exporter((2**62, 0, 2**62), data=0), None)):
    if text is None: assert source(exporter).nbytes == 0
    else: raises(muster.ArrayMemoryError, text, lambda: source(exporter))
    until(lambda: exporter.freed == 1, text)
for exporter, text in ((Exporter(version=2), "DLPack 2"), (Exporter(name=b"used_dltensor"), "consumed already"), (Exporter(name=b"other"), "consumed already")):
    raises(muster.ArrayMemoryError, text, lambda: source(exporter))
    assert exporter.freed == 0, "it was not consumed"
class Broken:
    def __dlpack_device__(self): return (1, 0)
    def __dlpack__(self, **asked): return 7
raises(muster.ArrayMemoryError, "no capsule", lambda: source(Broken()))
class Elsewhere(Exporter):
    def __dlpack_device__(self): return (2, 0)
raises(muster.ArrayMemoryError, "not on the host", lambda: source(Elsewhere()))
print("DONE")
"""
    run(scene, release, code, " ".join(DTYPES))


def test_memory_outlives_its_array(scene, release):
    code = """
add = jax.jit(lambda x: x + 1, donate_argnums=0)
def fill(): return [jnp.full((1 << 18,), 9.0).block_until_ready() for _ in range(8)]
for how in ("delete", "donate", "collect"):
    array = jnp.full((1 << 18,), 5.0).block_until_ready()
    held = source(array)
    if how == "delete": array.delete()
    if how == "donate":
        result = add(array)
        assert pointer(result) != held.address, "the computation has not used the memory"
    if how == "collect": del array
    gc.collect()
    others = fill()
    assert held.tobytes() == np.full(1 << 18, 5.0, np.float32).tobytes(), how
    if how == "delete": assert isinstance(raises(BufferError, "deleted, or donated", lambda: source(array)), muster.ArrayDeleted)
# Once it is given back, a donation reuses it.
array = jnp.full((1 << 18,), 5.0).block_until_ready()
held = source(array)
at = held.address
del held
def donated():
    global array
    before = pointer(array)
    array = add(array).block_until_ready()
    return pointer(array) == before
until(donated, "donations take place again")
gone = jnp.ones(4)
add(gone)
if gone.is_deleted():
    assert isinstance(raises(BufferError, "donated", lambda: source(gone)), muster.ArrayDeleted)
    assert _native.is_ready(gone) is None
# Over many rounds nothing is left.
def rounds(count):
    for n in range(count):
        array = jnp.full((1 << 18,), float(n))
        held = [source(array), source(np.full(1 << 17, n)), source(bytearray(1 << 20))]
        if n % 3 == 0: array.delete()
        buffer = muster.empty((1 << 18,), "float32", n % 3)
        taken = [buffer.array(), np.asarray(buffer), buffer.__dlpack__(), buffer.__dlpack__(max_version=(1, 3))]
        if n % 3 == 1: taken[0].delete()
        if n % 64 == 0: until(lambda: True, "")
        del array, held, buffer, taken
rounds(200)
gc.collect()
time.sleep(0.5)
before = resident()
rounds(2000)
until(lambda: resident() - before < 200 << 20, f"2000 rounds of 5 MiB have left {(resident() - before) >> 20} MiB")
exporters = [Exporter(version=n % 2 or None) for n in range(2000)]
for exporter in exporters: source(exporter)
until(lambda: all(exporter.freed == 1 for exporter in exporters), "each is given back once")
print("DONE")
"""
    run(scene, release, code)


def test_exports_are_counted_until_their_consumer_lets_go(scene, release):
    code = """
buffer = muster.empty((500, 500), "float32")
view = np.asarray(buffer)
view[:] = 1e-3
del view
# A computation that runs keeps the memory; a thread of XLA's lets go of it.
array = buffer.array()
result = slow(array)
del array
pending = not result.is_ready()
assert buffer.exports == 1 or not pending
result.block_until_ready()
until(lambda: buffer.exports == 0, "the computation is over")
# Several at once, each counted, in any thread.
taken = [buffer.array(), buffer.array(), np.asarray(buffer), memoryview(buffer), buffer.__dlpack__()]
assert buffer.exports == 5
taken[0].delete()
assert buffer.exports == 4
thread = threading.Thread(target=taken.clear)
thread.start(); thread.join()
until(lambda: buffer.exports == 0, "the other thread has let go")
# A capsule that nobody consumes, of each version; one that is consumed twice.
for version in (None, (0, 8), (1, 0), (1, 3)):
    capsule = buffer.__dlpack__(max_version=version)
    assert ("versioned" in repr(capsule)) == (version is not None and version[0] >= 1), repr(capsule)
    assert buffer.exports == 1
    del capsule
    assert buffer.exports == 0
class Twice:
    def __init__(self): self.capsule = buffer.__dlpack__()
    def __dlpack_device__(self): return (1, 0)
    def __dlpack__(self, **asked): return self.capsule
twice = Twice()
held = source(twice)
raises(muster.ArrayMemoryError, "consumed already", lambda: source(twice))
assert buffer.exports == 1 and held.address == buffer.address
del held, twice
until(lambda: buffer.exports == 0, "given back")
# Requests that are refused.
raises(BufferError, "no copies", lambda: buffer.__dlpack__(copy=True))
raises(BufferError, "CPU device 0", lambda: buffer.__dlpack__(dl_device=(2, 0)))
raises(BufferError, "no streams", lambda: buffer.__dlpack__(stream=1))
assert buffer.__dlpack_device__() == (1, 0) and muster.empty(1, "int8", 2).__dlpack_device__() == (1, 2)
assert buffer.exports == 0
# The array keeps the memory when the Buffer is gone.
buffer = muster.empty((1 << 20,), "uint8")
np.asarray(buffer)[:] = 3
array = buffer.array()
del buffer
gc.collect()
others = [muster.empty((1 << 20,), "uint8") for _ in range(20)]
for other in others: np.asarray(other)[:] = 9
assert int(array.max()) == 3
# Donating it leaves the memory as it is.
buffer = muster.empty((256,), "float32")
np.asarray(buffer)[:] = 4
array = buffer.array()
result = jax.jit(lambda x: x + 1, donate_argnums=0)(array).block_until_ready()
assert pointer(result) != buffer.address and bytes(memoryview(buffer)) == np.full(256, 4, np.float32).tobytes()
for bad, text in (((-1,), "negative"), ((1 << 62, 1 << 62), "address space"), ((1 << 50,), "this machine has"), ((1,) * 40, "dimensions")):
    raises(muster.ArrayMemoryError, text, lambda: muster.empty(bad, "int8"))
for bad, text in (("int4", "packed"), ("float4_e2m1fn", "packed"), ("float", "no data type"), (object, "no data type"), ("", "no data type")):
    raises(muster.ArrayMemoryError, text, lambda: muster.empty(3, bad))
raises(muster.SettingsError, "local CPU device", lambda: muster.empty(3, "int8", -1))
print("DONE")
"""
    run(scene, release, code)


def test_an_event_completes_when_an_array_is_defined(scene, release):
    code = """
import contextlib
import logging; logging.disable(logging.CRITICAL)
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from muster.jax import when_defined, _arrays
def checked(array, event=None):
    event = event or when_defined(array)
    event.wait(60)
    assert event.done()
    event.check()
when_defined(slow(ones)).wait(60)
early = 0
for _ in range(5):
    array = slow(ones)
    event = when_defined(array)
    at = pointer(array)
    early += not event.done() and not array.is_ready()
    # JAX waits for nothing here: the contents are there when the event says so.
    assert event.native.wait(60.0) is None
    seen = ctypes.string_at(at, array.nbytes)
    assert seen == np.asarray(array).tobytes() and event.done() and "over" in repr(event)
assert early > 0, "every array was defined at once, so this shows nothing"
def hop(array):
    "Also for an array that is defined already."
    _arrays._programs._kept.clear()
    event = _native.DefinitionEvent()
    _arrays._make_event_wait_for_array(event, array, [])
    event.arm()
    assert event.wait(60.0) is None
# In every memory of the device, and in every context of a program.
for memory in jax.devices()[1].addressable_memories():
    other = jax.device_put(np.ones(3), jax.sharding.SingleDeviceSharding(jax.devices()[1], memory_kind=memory.kind))
    hop(other)
    assert source(other).nbytes == 12
mesh = Mesh(np.array(jax.devices()), "x")
set_mesh = getattr(jax, "set_mesh", None) or jax.sharding.use_mesh
for context in (set_mesh(mesh), jax.transfer_guard("disallow"), jax.default_device(jax.devices()[2]), jax.debug_nans(True), jax.checking_leaks()):
    with context: hop(ones)
checked(jnp.ones(3)); checked(jnp.arange(8, dtype=jnp.int4)); checked(jnp.zeros((0, 3))); checked(jax.random.key(0))
# A short wait ends in time, and the event goes on.
array = jax.jit(lambda x: jax.lax.fori_loop(0, 2000, lambda i, y: jnp.tanh(y @ y), x))(ones)
event = when_defined(array)
raises(TimeoutError, "not defined within", lambda: event.wait(0.05))
raises(muster.Deadline, "wait()", event.check)
assert "pending" in repr(event)
# It may be deleted or donated meanwhile.
other = jax.jit(lambda x: x + 1, donate_argnums=0)(array)
assert array.is_deleted() and not event.done()
event.wait(120)
other.block_until_ready()
array = slow(ones); event = when_defined(array); array.delete(); event.wait(60)
raises(muster.ArrayDeleted, "deleted", lambda: when_defined(array))
# On other devices, and on several.
checked(slow(jax.device_put(ones, jax.devices()[2])))
sharding = NamedSharding(Mesh(np.array(jax.devices()), "x"), P("x"))
wide = jax.jit(lambda x: slow(ones)[:3] + x, out_shardings=sharding)
checked(wide(jax.device_put(np.ones((3, 500), np.float32), sharding)))
# From several threads.
threads = [threading.Thread(target=lambda: checked(slow(ones))) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join(60); assert not thread.is_alive()
# Python does not run the program instead of JAX.
array = slow(ones)
with jax.disable_jit(): event = when_defined(array)
at = pointer(array)
event.native.wait(60.0)
assert ctypes.string_at(at, array.nbytes) == np.asarray(array).tobytes()
# Inside jit there is nothing to wait for.
jax.jit(lambda x: (raises(muster.SettingsError, "outside", lambda: when_defined(x)), x)[1])(ones)
# The programs are bounded, and those of a former backend are gone.
_arrays._PROGRAMS_MAX = 3
for size in range(1, 7):
    _arrays._programs.get(jnp.ones(size), jax.devices()[0])
assert len(_arrays._programs._kept) <= 3
# A failure is told, before and after.
def bad(value):
    raise ValueError("the callback has failed")
fails = jax.jit(lambda v: jax.pure_callback(bad, jax.ShapeDtypeStruct((3,), jnp.float32), v[0, 0]))
failed = None
with contextlib.suppress(RuntimeError): failed = fails(slow(ones))
if failed is not None:
    event = None
    try: event = when_defined(failed)
    except muster.ComputationFailed: print("failed at once")
    if event is not None:
        failed.delete() if len(sys.argv) > 1 else None
        error = raises(muster.ComputationFailed, "the callback has failed", lambda: event.wait(60))
        assert event.done() and error.__cause__ is not None
        raises(muster.ComputationFailed, "failed", event.check)
        raises(muster.ComputationFailed, "failed", lambda: source(failed))
        raises(muster.ComputationFailed, "failed", lambda: when_defined(failed))
        print("FAILURE TOLD")
print("DONE", flush=True)
# JAX waits at exit for what has failed, and says so.
os._exit(0)
"""
    text = scene.python(release, COMMON + code).succeed()
    assert text.endswith("DONE"), text
    # JAX 0.6.2 computes callbacks at once, and raises there.
    assert release == "0.6.2" or "FAILURE TOLD" in text or "failed at once" in text, text


def test_events_of_arrays_of_a_former_backend(scene, release):
    code = """
from jax.extend.backend import clear_backends
from muster.jax import when_defined, _arrays
when_defined(slow(ones)).wait(60)
long = jax.jit(lambda x: jax.lax.fori_loop(0, 1000, lambda i, y: jnp.tanh(y @ y), x))
old = long(ones)
buffer = muster.empty((4,), "float32")
shared = buffer.array()
held = source(ones)
clear_backends(); jax.clear_caches()
event = when_defined(old)
event.wait(120)
assert np.asarray(old).shape == (500, 500)
assert len(held.tobytes()) == ones.nbytes
new = jax.jit(lambda x: x * 2)(jnp.ones((300, 300)))
when_defined(new).wait(60)
np.asarray(buffer)[:] = 3
assert float(buffer.array().sum()) == 12.0 and float(np.asarray(shared).sum()) == 12.0
del shared, old, new, event
until(lambda: buffer.exports == 0, "given back")
print("DONE")
"""
    run(scene, release, code)


def test_shardings_are_described_for_the_planner(scene, release):
    code = """
import json
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding
from muster.jax import describe
ids = [device.id for device in jax.devices()]
mesh = Mesh(np.array(jax.devices()).reshape(3, 1), ("data", "model"))
array = jax.device_put(np.zeros((6, 4), np.float32), NamedSharding(mesh, P("data", None)))
wanted = {"shape": [6, 4], "dtype": "float32", "sharding": {"mesh": {"axes": [{"name": "data", "size": 3}, {"name": "model", "size": 1}], "devices": ids}, "spec": ["data", None]}}
assert describe(array) == wanted, describe(array)
found = [describe(array)]
for spec, entries in ((P(), []), (P(("data", "model")), [["data", "model"]]), (P(None, "model"), [None, "model"]), (P(("data",),), [["data"]])):
    found.append(describe(jax.ShapeDtypeStruct((6, 4), jnp.bfloat16, sharding=NamedSharding(mesh, spec))))
    got = found[-1]["sharding"]["spec"]
    assert [[e] if isinstance(e, str) else e for e in got] == [[e] if isinstance(e, str) else e for e in entries], got
found.append(describe(jnp.ones((6, 4))))
assert found[-1]["sharding"] == {"mesh": {"axes": [], "devices": ids[:1]}, "spec": [None, None]}
# Any other sharding, by the part of each device.
from jax._src.sharding_impls import GSPMDSharding
from jaxlib.xla_client import OpSharding
def gspmd(dimensions, devices, last=False):
    op = OpSharding()
    op.type = OpSharding.Type.OTHER
    op.tile_assignment_dimensions = dimensions
    op.tile_assignment_devices = devices
    op.replicate_on_last_tile_dim = last
    return GSPMDSharding(jax.devices(), op)
tiled = describe(jax.ShapeDtypeStruct((6, 4), jnp.float32, sharding=gspmd([3, 1], [2, 0, 1])))
assert tiled["sharding"] == {"mesh": {"axes": [{"name": "dimension0", "size": 3}], "devices": [ids[2], ids[0], ids[1]]}, "spec": ["dimension0", None]}, tiled
copied = describe(jax.ShapeDtypeStruct((6, 4), jnp.float32, sharding=gspmd([1, 1, 3], [0, 1, 2], True)))
assert copied["sharding"] == {"mesh": {"axes": [{"name": "copies", "size": 3}], "devices": ids}, "spec": [None, None]}, copied
found += [tiled, copied]
struct = lambda sharding: jax.ShapeDtypeStruct((6, 4), jnp.float32, sharding=sharding)
refused = [(struct(NamedSharding(mesh, P(P.UNCONSTRAINED))), "unconstrained"), (struct(None), "no sharding")]
try: abstract = NamedSharding(AbstractMesh((3, 1), ("data", "model")), P("data"))
except TypeError: abstract = NamedSharding(AbstractMesh((("data", 3), ("model", 1))), P("data"))
refused.append((struct(abstract), "abstract mesh"))
try: refused.append((struct(NamedSharding(mesh, P("data", unreduced={"model"}))), "unreduced"))
except Exception as error: print("no unreduced here:", type(error).__name__)
for value, text in refused:
    try: describe(value)
    except muster.SettingsError as error: assert text in str(error), error; assert isinstance(error, ValueError)
    else: raise AssertionError(text)
raises(muster.SettingsError, "key_data", lambda: describe(jax.random.key(0)))
for each in found: print("FOUND", json.dumps(each))
print("DONE")
"""
    text = run(scene, release, code)
    found = [json.loads(line.removeprefix("FOUND ")) for line in text.splitlines() if line.startswith("FOUND ")]
    assert len(found) == 8
    for description in found:
        device = description["sharding"]["mesh"]["devices"][0]
        whole = {"mesh": {"axes": [], "devices": [device]}, "spec": []}
        plan = [TOOLS / "bin/muster", "transfer", "plan", "--source", json.dumps(description), "--destination"]
        plan += [json.dumps(description | {"sharding": whole}), "--json"]
        done = subprocess.run(plan, env=clean_environment(), capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0 and json.loads(done.stdout)["source"] == description, done


EXITS = {
    "return": "",
    "sys.exit": "sys.exit(0)",
    "an exception": "os.dup2(1, 2); raise ValueError('mine')",
    "os._exit": "os._exit(0)",
    "in atexit": "import atexit; atexit.register(lambda: held.append((source(ones), muster.empty(9, 'int8').array())))",
}


@outer_releases
@pytest.mark.parametrize("how", EXITS)
def test_a_program_ends_at_any_moment(scene, release, how):
    code = """
from muster.jax import when_defined
buffer = muster.empty((500, 500), "float32", 1)
held = [buffer, buffer.array(), np.asarray(buffer), memoryview(buffer), buffer.__dlpack__(), buffer.__dlpack__(max_version=(1, 0)),
        source(ones), source(np.ones(5)), source(b"bytes"), source(buffer.array()), slow(buffer.array())]
held.append(when_defined(held[-1]))
cycle = [held]; cycle.append(cycle)
def churn():
    # Not with JAX: a thread in a call of it when the interpreter ends aborts the process.
    while True: np.asarray(muster.empty(1000, "float32")), source(np.ones(9)), source(bytearray(10)), muster.empty(9, "int8").__dlpack__()
for _ in range(3): threading.Thread(target=churn, daemon=True).start()
time.sleep(random.random() * 0.3)
pending = slow(buffer.array()); events = [when_defined(pending)]
print("DONE", flush=True)
"""
    program = scene.python(release, COMMON + code + EXITS[how])
    assert program.end() == (1 if how == "an exception" else 0), program.text()
    after = program.text().split("DONE", 1)[1]
    assert "ValueError: mine" in after if how == "an exception" else "Traceback" not in after, program.text()


def test_a_program_without_jax_ends_at_any_moment(scene):
    code = """
import random, sys, threading, time, muster
from muster._memory import source
buffer = muster.empty(100, "int8")
held = [buffer, memoryview(buffer), buffer.__dlpack__(), source(b"bytes"), source(buffer)]
def churn():
    while True: source(bytearray(100)), memoryview(muster.empty(100, "int8")), muster.empty(9, "int8").__dlpack__()
for _ in range(4): threading.Thread(target=churn, daemon=True).start()
time.sleep(random.random() * 0.1)
print("DONE", flush=True)
"""
    programs = [scene.start([sys.executable, "-c", code]) for _ in range(12)]
    for program in programs:
        assert program.succeed().endswith("DONE"), program.text()


def test_a_forked_process_is_told_so(scene):
    code = """
import gc, os, sys, muster
from muster import _native
from muster._memory import source
def raises(call):
    try: call()
    except muster.MusterError as error: assert "forked" in str(error) and "spawn" in str(error), error; return
    raise AssertionError("no error")
buffer, lent = muster.empty(100, "int8"), source(bytearray(b"lent"))
view, capsule = memoryview(buffer), buffer.__dlpack__()
event = _native.DefinitionEvent()
view[0] = 5
child = os.fork()
if child == 0:
    for call in (lambda: memoryview(buffer), buffer.__dlpack__, lambda: buffer.exports, lambda: muster.empty(1, "int8"), lambda: source(b"x"),
                 lambda: source(buffer), lent.tobytes): raises(call)
    view.release()
    del view, capsule, buffer, lent
    gc.collect()
    print("CHILD", flush=True)
    sys.exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert buffer.exports == 2 and view[0] == 5 and lent.tobytes() == b"lent", "the child has changed nothing here"
print("DONE")
"""
    text = scene.start([sys.executable, "-W", "ignore::DeprecationWarning", "-c", code]).succeed()
    assert "CHILD" in text and text.endswith("DONE"), text


def test_memory_needs_neither_numpy_nor_jax(scene):
    code = """
import copy, pickle, sys, muster
from muster._memory import source
buffer = muster.empty((2, 3), "float32")
view = memoryview(buffer)
assert (view.format, view.shape, view.strides, view.readonly, buffer.exports) == ("f", (2, 3), (12, 4), False, 1)
view[1, 2] = 4.0
found = source(buffer)
assert found.tobytes()[-4:] == view.tobytes()[-4:] != bytes(4) and found.address == buffer.address
assert source(view).address == buffer.address
view.release()
assert source(bytearray(b"bytes")).tobytes() == b"bytes"
for make in (pickle.dumps, copy.copy, copy.deepcopy):
    try: make(buffer)
    except TypeError: continue
    raise AssertionError(make)
assert not {"jax", "numpy"} & set(sys.modules)
print("DONE")
"""
    found = sorted(TARGET.glob("python3.*/bin/python"))
    assert found
    for python in found:
        assert scene.start([python, "-c", code]).succeed().endswith("DONE")
    buffer = muster.empty((2, 3), "float32")
    assert isinstance(buffer, _native.Buffer) and repr(buffer) == "<muster.Buffer float32(2, 3) on CPU device 0>"
    for bad in (1.5, "12", None, [1.5]):
        with pytest.raises(TypeError):
            muster.empty(bad, "int8")
    with pytest.raises(AttributeError):
        buffer.other = 1


def test_what_is_told_of_memory_errors_can_be_caught():
    assert issubclass(muster.ArrayMemoryError, BufferError) and issubclass(muster.ArrayDeleted, muster.ArrayMemoryError)
    assert issubclass(muster.ComputationFailed, muster.MusterError) and issubclass(muster.CopyWarning, UserWarning)
