"""Engine.device_put() of trees: all arrays move at once, between real processes, and arrays of every data type."""

from __future__ import annotations

import json

from test_transfer import JAX, jax_task, transfers

# A JAX process with one CPU device, one of four.
FOUR = """
import json, sys, time, os, jax
jax.config.update("jax_num_cpu_devices", 1)
try: jax.config.update("jax_cpu_collectives_implementation", "gloo")
except AttributeError: pass
import muster.jax, muster.transfer
me = int(sys.argv[2])
muster.jax.initialize(sys.argv[1], 4, me, initialization_timeout=60)
import jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
engine = muster.transfer.attach()
def say(*what): print(*what, flush=True)
data = Mesh(np.array(jax.devices()), ("data",))
both = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))
def stop():
    while not os.path.exists(os.environ["STOP"]):
        time.sleep(0.05)
    jax.distributed.shutdown()
"""


def four(scene, release, server, code: str, tmp_path):
    return [scene.python(release, FOUR + code, server.grpc, str(me), STOP=str(tmp_path / "stop")) for me in range(4)]


def test_a_tree_of_arrays_moves_in_one_launch_with_each_process_and_no_byte_too_many(scene, release, tmp_path):
    server = scene.serve("--tasks", "4")
    code = """
rng = np.random.default_rng(7)
dtypes = [jnp.float32, jnp.bfloat16, jnp.int8, jnp.bool_, jnp.float8_e4m3fn, jnp.complex64, jnp.uint16, jnp.int32]
whole, before, after = [], [], []
for number in range(200):
    shape = tuple(int(4 * size) for size in rng.integers(1, 9, size=1 + number % 3))
    values = rng.integers(0, 100, size=shape).astype(np.dtype(dtypes[number % len(dtypes)]))
    specs = [P("data", "model"), P("model"), P(("model", "data")), P(("data", "model")), P(None, "model")]
    # Nothing is passed on: a part that one process has goes to two others at most.
    spec = specs[number // 3 % (len(specs) if len(shape) > 1 else 4)]
    whole.append(values)
    # A tenth of the arrays is on all processes before and after, and does not move.
    before.append(NamedSharding(data, P() if number % 10 == 9 else P("data")))
    after.append(NamedSharding(both, P() if number % 10 == 9 else P(*tuple(spec)[: len(shape)])))
arrays = [jax.make_array_from_callback(v.shape, s, lambda index, v=v: v[index]) for v, s in zip(whole, before)]

# Counted element by element: what a process is to have and does not have must come from another one.
moved = np.zeros((4, 4), np.int64)
for values, one, other in zip(whole, before, after):
    def masks(sharding):
        found = {}
        for device, index in sharding.devices_indices_map(values.shape).items():
            mask = found.setdefault(device.process_index, np.zeros(values.shape, bool))
            mask[index] = True
        return found
    held, wanted = masks(one), masks(other)
    for receiver, mask in wanted.items():
        missing = mask & ~held[receiver]
        for sender in held:
            # Each element has one holder, unless all have it, and then none is missing.
            moved[sender, receiver] += int((missing & held[sender]).sum()) * values.dtype.itemsize

def tree(leaves):
    return {"layers": [{"a": leaves[n], "b": (leaves[n + 1],)} for n in range(0, 198, 2)], "rest": leaves[198:]}
result = engine.device_put(tree(arrays), tree(after))
assert jax.tree_util.tree_structure(result) == jax.tree_util.tree_structure(tree(whole))
for number, (got, had, values, sharding) in enumerate(zip(jax.tree_util.tree_leaves(result), arrays, whole, after)):
    assert got.sharding == sharding and got.shape == values.shape and got.dtype == values.dtype
    for shard in got.addressable_shards:
        assert np.asarray(shard.data).tobytes() == np.ascontiguousarray(values[shard.index]).tobytes(), (number, shard.index)
    if number % 10 == 9:
        pointers = [array.addressable_shards[0].data.unsafe_buffer_pointer() for array in (got, had)]
        assert pointers[0] == pointers[1], "it was not moved"
        assert engine.device_put(had, had.sharding) is had
say("MOVED", json.dumps(moved.tolist()))
stop()
"""
    programs = four(scene, release, server, code, tmp_path)
    moved = json.loads(programs[0].line("MOVED (.*)")[1])
    for program in programs:
        program.line("MOVED")
    total = sum(map(sum, moved))
    pairs = {frozenset((one, other)) for one in range(4) for other in range(4) if moved[one][other]}
    assert len(pairs) == 6

    def seen(_):
        page = transfers(server)
        return page if sum(bytes["received"] for bytes in page["totals"]["bytes"]) >= total and page["reporting"] == 4 else None

    page = server.until("all have reported what they have moved", seen)
    assert {outcome["outcome"]: outcome["launches"] for outcome in page["totals"]["launches"]} == {"completed": 2 * len(pairs)}, page
    assert sum(bytes["received"] for bytes in page["totals"]["bytes"]) == total, page
    assert sum(bytes["sent"] for bytes in page["totals"]["bytes"]) == total, page
    received = [[0] * 4 for _ in range(4)]
    for pair in page["pairs"]:
        received[pair["from"]][pair["to"]] += pair["received"] or 0
    assert received == moved, page
    (tmp_path / "stop").touch()
    for program in programs:
        program.succeed()


def test_a_tree_is_gathered_spread_and_put_onto_other_processes(scene, release, tmp_path):
    server = scene.serve("--tasks", "4")
    code = """
values = {"w": [np.arange(24 * 8, dtype=np.float32).reshape(24, 8) + n for n in range(30)], "b": np.arange(8, dtype=np.int32)}
def put(sharding):
    return jax.tree_util.tree_map(lambda v: jax.make_array_from_callback(v.shape, sharding, lambda index: v[index]), values)
def check(tree):
    for got, want in zip(jax.tree_util.tree_leaves(tree), jax.tree_util.tree_leaves(values)):
        assert got.shape == want.shape and got.dtype == want.dtype
        for shard in getattr(got, "addressable_shards", []):
            assert (np.asarray(shard.data) == want[shard.index]).all()

# One sharding for all; to all processes, by which parts are passed on; and back.
rows, everywhere = NamedSharding(data, P("data")), NamedSharding(data, P())
tree = put(rows)
gathered = engine.device_put(tree, everywhere)
check(gathered)
check(engine.device_put(gathered, rows))
# A prefix of the tree, and a device in place of a sharding.
mixed = engine.device_put(tree, {"w": NamedSharding(both, P("model", "data")), "b": jax.devices()[2]})
check(mixed)
assert mixed["b"].sharding.device_set == {jax.devices()[2]}
# To processes that have none of it, which give structures.
some = [NamedSharding(Mesh(np.array(jax.devices()[at : at + 2]), ("x",)), P("x")) for at in (0, 2)]
struct = jax.tree_util.tree_map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=some[0]), values)
given = put(some[0]) if me < 2 else struct
moved = engine.device_put(given, some[1])
check(moved)
assert len(getattr(moved["b"], "addressable_shards", [])) == (1 if me >= 2 else 0)
assert engine.device_put({}, rows) == {} and engine.device_put([None, ()], rows) == [None, ()]
say("DONE")
stop()
"""
    programs = four(scene, release, server, code, tmp_path)
    for program in programs:
        program.line("DONE")
    (tmp_path / "stop").touch()
    for program in programs:
        program.succeed()


def test_errors_name_the_array_of_the_tree(scene, release, tmp_path):
    server = scene.serve("--tasks", "2")
    code = """
import os
mesh = Mesh(np.array(jax.devices()), ("x",))
rows, columns = NamedSharding(mesh, P("x")), NamedSharding(mesh, P(None, "x"))
def put(shape=(8, 8), dtype=np.float32):
    return jax.make_array_from_callback(shape, rows, lambda index: np.zeros(shape, dtype)[index])
def refused(kind, tree, shardings, *says):
    try: engine.device_put(tree, shardings, timeout=60)
    except kind as error: assert type(error) is kind and all(text in str(error) for text in says), error
    else: raise AssertionError(f"{says} was not said")
def state(leaf): return {"b": put(), "w": [leaf, put()]}
gone = put()
gone.delete()
refused(muster.SettingsError, state(np.zeros((8, 8))), columns, "state['w'][0]: a ndarray has no sharding")
refused(muster.ArrayDeleted, state(gone), columns, "state['w'][0]: ")
refused(muster.PlanError, state(put((8, 3))), columns, "state['w'][0]: ", "divi")
refused(muster.PlanError, state(jax.ShapeDtypeStruct((8, 8), np.float32)), columns, "state['w'][0]: ", "no sharding")
refused(muster.SettingsError, state(put()), P("x"), "state['b']: ", "NamedSharding(mesh, spec)")
refused(muster.SettingsError, state(put()), {"b": rows}, "tree of shardings")
refused(muster.PlanError, state(jax.ShapeDtypeStruct((8, 8), np.float32, sharding=rows)), columns, "state['w'][0]: ", "0 of 64 bytes")
engine.wait_for_peers([peer])
# The processes have different arrays: both are told which, and go on.
refused(muster.LayoutMismatch, state(put(dtype=np.float32 if me else np.int32)), columns, "state['w'][0]: ", "another process")
more = [put(), put()] + [put()] * me
refused(muster.LayoutMismatch, more, columns, "state[2]: " if me else "another process")
for got in jax.tree_util.tree_leaves(engine.device_put(state(put()), columns)):
    assert got.sharding == columns
say("DONE")
while not os.path.exists(os.environ["STOP"]):
    time.sleep(0.05)
jax.distributed.shutdown()
"""
    programs = [jax_task(scene, release, server, me, code, STOP=str(tmp_path / "stop")) for me in range(2)]
    for program in programs:
        program.line("DONE")
    (tmp_path / "stop").touch()
    for program in programs:
        program.succeed()


# The data types of JAX's releases, and those that not every release has, or can have on CPUs.
DTYPES = (
    "bool int4 uint4 int8 int16 int32 int64 uint8 uint16 uint32 uint64 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2 "
    "float8_e5m2fnuz float16 bfloat16 float32 float64 complex64 complex128"
)
LATER = "int2 uint2 float8_e3m4 float8_e4m3 float8_e8m0fnu float4_e2m1fn"


def test_arrays_of_every_data_type_move(scene, release, tmp_path):
    server = scene.serve("--tasks", "2")
    code = """
import os, warnings
from muster.transfer import Receive, Send
engine.wait_for_peers([peer])
mesh = Mesh(np.array(jax.devices()), ("x",))
rows, columns = NamedSharding(mesh, P("x")), NamedSharding(mesh, P(None, "x"))
local = NamedSharding(Mesh(np.array(jax.local_devices()), ("x",)), P("x"))
names, later = sys.argv[4].split(), sys.argv[5].split()

def values(shape, dtype, seed):
    bits = np.random.default_rng(seed).integers(0, 256, size=(int(np.prod(shape)), dtype.itemsize), dtype=np.uint8)
    if name == "bool": bits &= 1
    if "int2" in name or "int4" in name or "float4" in name:
        # As the conversion of small numbers has them.
        return (bits[:, 0] % (4 if "2" in name[-1] else 8)).astype(np.int8).astype(dtype).reshape(shape)
    return bits.reshape(-1).view(dtype).reshape(shape)
def same(got, want):
    assert got.dtype == want.dtype and got.shape == want.shape, (got.dtype, got.shape)
    assert np.asarray(got).tobytes() == np.ascontiguousarray(want).tobytes(), (name, np.asarray(got), want)

found, packed = [], []
for name in names + later:
    try:
        dtype = jnp.dtype(getattr(jnp, name, None) or name)
        jax.device_put(np.zeros((2, 2), dtype)).block_until_ready()
    except Exception as error:
        assert name in later, (name, error)
        continue
    found.append(name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for shape in ((3, 5), (), (0, 3), (8, 8)):
            mine, theirs = values(shape, dtype, me), values(shape, dtype, peer)
            # An odd number of elements, none, and one that is divided among two devices.
            struct = jax.ShapeDtypeStruct(shape, dtype, sharding=local if shape == (8, 8) else None)
            array = jax.device_put(mine, local) if shape == (8, 8) else jax.device_put(mine)
            both = [Send(array, peer, f"{me} {shape}"), Receive(struct, peer, f"{peer} {shape}")]
            for shard in getattr(engine.transfer(both).result()[1], "addressable_shards"):
                same(shard.data, theirs[shard.index])
        # Whole bytes in each shard; two columns, which are no whole byte of int2; and an odd number, on one device.
        tree = {}
        for number, shape in enumerate([(8, 16), (8, 8), (8, 4), (4, 3)]):
            whole = values(shape, dtype, number)
            array = jax.make_array_from_callback(shape, rows, lambda index: whole[index])
            tree[shape] = (array, columns if shape != (4, 3) else jax.sharding.SingleDeviceSharding(jax.devices()[3]), whole)
        moved = engine.device_put({shape: array for shape, (array, _, _) in tree.items()}, {shape: to for shape, (_, to, _) in tree.items()})
        for shape, (_, _, whole) in tree.items():
            for shard in getattr(moved[shape], "addressable_shards", []):
                same(shard.data, whole[shard.index])
    texts = [str(warning.message) for warning in caught if warning.category is muster.CopyWarning]
    if texts:
        packed.append(name)
        assert len(texts) == 5 and "share bytes" in texts[0] and name in texts[0], texts
# Peers that have other types of as many bits are told so.
try:
    dtype = [jnp.int4, jnp.uint4][me]
    warnings.simplefilter("ignore")
    engine.transfer([Send(jnp.zeros((4, 4), dtype), peer, f"of {me}"), Receive(jax.ShapeDtypeStruct((4, 4), dtype), peer, f"of {peer}")]).wait()
except muster.LayoutMismatch as error:
    say("MISMATCH", error)
say("DTYPES", *found)
say("PACKED", *packed)
while not os.path.exists(os.environ["STOP"]):
    time.sleep(0.05)
jax.distributed.shutdown()
"""
    programs = [
        scene.python(release, JAX + code, server.grpc, str(me), server.http, DTYPES, LATER, JAX_ENABLE_X64="1", STOP=str(tmp_path / "stop"))
        for me in range(2)
    ]
    for program, mine in zip(programs, ("int4[4, 4] here", "uint4[4, 4] here")):
        found = program.line("DTYPES (.*)")[1].split()
        assert found[: len(DTYPES.split())] == DTYPES.split()
        packed = program.line("PACKED (.*)")[1].split()
        assert packed == [name for name in found if name.lstrip("u") in ("int4", "int2", "float4_e2m1fn")], (found, packed)
        assert mine in program.line("MISMATCH (.*)")[1]
    (tmp_path / "stop").touch()
    for program in programs:
        program.succeed()
