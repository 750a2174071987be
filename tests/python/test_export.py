"""muster.export: named shardings of exported programs become plans, and come back."""

from __future__ import annotations

import json
import subprocess

import pytest

from conftest import ORBAX_RELEASES, PATIENCE_S, TOOLS, clean_environment, orbax_interpreter, skip

import muster.export
from muster import SettingsError

# A program over 2 x 2 CPU devices, exported, and serialised if this environment can.
EXPORT = """
import os, sys, json
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
import jax, numpy as np, jax.numpy as jnp, muster.export
from jax import export
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))
named = lambda *spec: NamedSharding(mesh, P(*spec))
shardings = {"in_shardings": (named("data", "model"), named(None, ("model", "data"))), "out_shardings": named("data")}
struct = jax.ShapeDtypeStruct((8, 8), jnp.bfloat16)
exported = export.export(jax.jit(lambda x, w: x @ w, **shardings))(struct, struct)
if "serialise" in sys.argv:
    exported = export.deserialize(exported.serialize())
"""
SHOW = EXPORT + """
found = muster.export.shardings(exported)
descriptions = [array.describe(mesh.devices) for array in (*found.inputs, *found.outputs)]
print("FOUND", json.dumps(descriptions))
for description, sharding in zip(descriptions, (*shardings["in_shardings"], shardings["out_shardings"])):
    back = muster.export.struct(json.loads(json.dumps(description)))
    assert back.shape == (8, 8) and back.dtype == jnp.bfloat16
    assert back.sharding.is_equivalent_to(sharding, 2), (back.sharding, sharding)
    assert back.sharding.mesh == mesh
    # An array with the sharding of the description is one that the program takes.
    jax.device_put(jnp.zeros(back.shape, back.dtype), back.sharding)
"""
NOT = EXPORT + """
try: muster.export.shardings(exported)
except muster.SettingsError as error: print("NONE", error)
"""


def described(scene, program) -> list[dict]:
    return json.loads(program.line(r"^FOUND (.*)")[1])


def check(descriptions: list[dict]) -> None:
    specs = [description["sharding"]["spec"] for description in descriptions]
    # JAX may leave out or add entries of dimensions that are whole.
    assert [[*spec, None][:2] for spec in specs] == [["data", "model"], [None, ["model", "data"]], ["data", None]], specs
    for description in descriptions:
        mesh = description["sharding"]["mesh"]
        assert (description["shape"], description["dtype"]) == ([8, 8], "bfloat16")
        assert mesh == {"axes": [{"name": "data", "size": 2}, {"name": "model", "size": 2}], "devices": [0, 1, 2, 3]}
    # The planner takes them.
    plan = [TOOLS / "bin/muster", "transfer", "plan", "--json", "--source", json.dumps(descriptions[0]), "--destination"]
    done = subprocess.run(
        [*plan, json.dumps(descriptions[1])], env=clean_environment(), capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"], done.stdout


def test_named_shardings_become_descriptions_of_the_planner_and_come_back(scene, release):
    if release == "0.6.2":
        program = scene.python(release, NOT)
        assert "NONE the exported program has no named shardings: export it with JAX 0.9.2" in program.succeed()
        return
    program = scene.python(release, SHOW)
    check(described(scene, program))
    program.succeed()


@pytest.mark.parametrize("with_serialisation", ORBAX_RELEASES)
def test_a_serialised_program_keeps_its_names(request, scene, with_serialisation):
    if not orbax_interpreter(with_serialisation).exists():
        skip(request, f"flatbuffers beside JAX {with_serialisation}", "run tests/jax/setup, then tests/python/setup")
    program = scene.start([orbax_interpreter(with_serialisation), "-c", SHOW, "serialise"])
    check(described(scene, program))
    program.succeed()


SHARDING = muster.export.ArraySharding((4, 4), "float32", (("x", 2),), ("x",))


def test_devices_that_do_not_fit_are_refused():
    with pytest.raises(SettingsError, match=r"x=2 has 2 place\(s\), and there are 3"):
        SHARDING.describe([1, 2, 3])
    assert SHARDING.describe([7, 5])["sharding"]["mesh"]["devices"] == [7, 5]


REFUSED = """
import json, sys, muster.export
for description in json.loads(sys.argv[1]):
    try: muster.export.struct(description)
    except muster.SettingsError as error: print("REFUSED", error)
"""


def test_descriptions_that_are_none_are_refused(scene):
    good = SHARDING.describe([0, 1])
    mesh = {"axes": [{"name": "x", "size": 3}], "devices": [0]}
    spec = {**good["sharding"], "spec": ["y"]}
    bad = [
        {},
        {**good, "dtype": "no such type"},
        {**good, "sharding": {**good["sharding"], "mesh": {**mesh, "devices": [0, 99]}}},
        {**good, "sharding": {**good["sharding"], "mesh": mesh}},
        {**good, "sharding": {"mesh": {"axes": [{"name": "x", "size": 1}], "devices": [0]}, "spec": spec["spec"]}},
    ]
    text = scene.python("0.10.2", REFUSED, json.dumps(bad)).succeed()
    refusals = [line for line in text.splitlines() if line.startswith("REFUSED")]
    assert len(refusals) == len(bad), text
    for line, words in zip(refusals, ("no description", "no description", "device(s) 99", "JAX refuses", "JAX refuses")):
        assert words in line, text
