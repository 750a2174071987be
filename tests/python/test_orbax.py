"""muster.orbax: rows of hosts, and real checkpoints of Orbax that processes restore on other hosts than before."""

from __future__ import annotations

import json
import re

import pytest

from conftest import ORBAX_RELEASES, Scene, orbax_interpreter, skip
from test_jax import GLOO, WORK, place, sums

from muster import ClusterEnvError, MusterError, orbax

JOIN = (
    "import json, os, pathlib, sys, muster.jax, muster.orbax\n"
    + GLOO
    + "muster.jax.initialize(initialization_timeout=60)\n"
    + "host = os.environ['MUSTER_HOST_ID']\n"
)
# Saves a checkpoint on this "host" and restores it, first as plain Orbax does, then with muster. The checkpoint of a host is where
# `hosts` says, whoever runs there.
CHECKPOINT = JOIN + """
import jax, numpy as np
import orbax.checkpoint as ocp
from etils import epath
from absl import flags
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from orbax.checkpoint._src.multihost import multihost
from orbax.checkpoint.experimental.emergency import replicator_checkpoint_manager as replicator
flags.FLAGS(["program"])
phase, root, disk = sys.argv[1], epath.Path(sys.argv[2]), sys.argv[3]
mesh = Mesh(np.array(jax.devices()), ("x",))
sharding = NamedSharding(mesh, P("x"))
whole = np.arange(12, dtype=np.float32)
array = jax.make_array_from_callback((12,), sharding, lambda index: whole[index])
def manager(how):
    options = replicator.ReplicatorCheckpointManagerOptions()
    return replicator.ReplicatorCheckpointManager(root / how / disk, options, global_mesh=mesh)
def save(how):
    (root / how / disk).mkdir(parents=True, exist_ok=True)
    with manager(how) as checkpoints:
        checkpoints.save(1, args=ocp.args.Composite(state=ocp.args.PyTreeSave({"w": array})))
        checkpoints.wait_until_finished()
    print("SAVED", how, flush=True)
def restore(how):
    struct = {"w": jax.ShapeDtypeStruct((12,), np.float32, sharding=sharding)}
    restore_args = ocp.checkpoint_utils.construct_restore_args(struct)
    try:
        with manager(how) as checkpoints:
            args = ocp.args.Composite(state=ocp.args.PyTreeRestore(struct, restore_args=restore_args))
            got = checkpoints.restore(1, args=args).state["w"]
        right = np.array_equal(np.asarray(got.addressable_data(0)), np.asarray(array.addressable_data(0)))
        print("RESTORED", how, "right" if right else "wrong", flush=True)
    except Exception as error:
        print("RESTORED", how, "not at all:", type(error).__name__, str(error)[:100].replace("\\n", " "), flush=True)
multihost.initialize_runtime_to_distributed_ids()
multihost.initialize_distributed_to_device_ids()
act = {"save": save, "restore": restore}[phase]
if "plain" in sys.argv[4:-1]:
    act("plain")
print("ROWS", json.dumps(muster.orbax.install(60)), flush=True)
act("muster")
jax.distributed.shutdown()
"""


@pytest.fixture(params=ORBAX_RELEASES)
def orbax_release(request) -> str:
    """Each JAX release for which there is an environment with Orbax."""
    if not orbax_interpreter(request.param).exists():
        skip(request, f"Orbax beside JAX {request.param}", "run tests/jax/setup, then tests/python/setup")
    return request.param


def run(scene: Scene, release: str, code: str, hosts: list[str], *arguments: str, orbax=True, disks=None) -> list[str]:
    """Runs a process on each of the "hosts", with the ids 0, 1, …; returns what they wrote."""
    server = scene.serve("--tasks", str(len(hosts)))
    programs = []
    for process, host in enumerate(hosts):
        given = [argument.format(disk=(disks or {}).get(host, host)) for argument in arguments]
        command = [orbax_interpreter(release)] if orbax else None
        variables = place(server, process, len(hosts)) | {"MUSTER_HOST_ID": host}
        if command:
            programs.append(scene.start([*command, "-c", code, *given, server.http], **variables))
        else:
            programs.append(scene.python(release, code, *given, server.http, **variables))
    return [program.succeed() for program in programs]


def restored(texts: list[str], how: str) -> list[str]:
    """What became of each process's restore."""
    return [found for text in texts for found in re.findall(rf"^RESTORED ({how} .*)", text, re.MULTILINE)]


def test_a_checkpoint_is_restored_by_processes_that_changed_hosts(scene, orbax_release, tmp_path):
    saved = run(scene, orbax_release, CHECKPOINT, ["a", "b"], "save", str(tmp_path), "{disk}", "plain")
    assert all("SAVED plain" in text and "SAVED muster" in text for text in saved), saved
    hosts = [json.loads(file.read_text()) for file in tmp_path.rglob("muster_hosts.json")]
    assert hosts == [[["a", 0], ["b", 0]]] * 2, hosts
    # Every process is on another host than before.
    moved = run(scene, orbax_release, CHECKPOINT, ["b", "a"], "restore", str(tmp_path), "{disk}", "plain")
    assert all(line.startswith("plain not at all: ") for line in restored(moved, "plain")), restored(moved, "plain")
    assert restored(moved, "muster") == ["muster right"] * 2
    # Host b is replaced by one that is sorted before all others; the replicator has brought it the data of b.
    disks = {"0-new": "b"}
    replaced = run(scene, orbax_release, CHECKPOINT, ["a", "0-new"], "restore", str(tmp_path), "{disk}", disks=disks)
    assert restored(replaced, "muster") == ["muster right"] * 2


ROWS = JOIN + "print('ROWS', json.dumps(muster.orbax.host_rows(60)), jax.local_devices()[0].id, flush=True)\n" + WORK


def test_rows_are_in_the_order_of_the_hosts_and_not_of_the_processes(scene, release):
    seen = run(scene, release, ROWS, ["b", "c", "a"], orbax=False)
    rows, own = zip(*(line.split("ROWS ")[1].splitlines()[0].rsplit(" ", 1) for line in seen))
    assert len(set(rows)) == 1, seen
    b, c, a = (int(device) for device in own)
    assert json.loads(rows[0]) == [[a], [b], [c]], seen


def test_two_processes_of_one_identity_are_told_so(scene):
    code = JOIN + "try: muster.orbax.host_rows(60)\nexcept muster.ClusterEnvError as error: print('REFUSED', error, flush=True)\n" + WORK
    release = "0.10.2"
    for text in run(scene, release, code, ["same", "same"], orbax=False):
        assert "REFUSED processes 0 and 1 both say that they are process 0 of host same" in text, text
        assert "MUSTER_LOCAL_PROCESS_ID" in text, text


def test_a_process_that_does_not_call_it_is_named(scene):
    code = JOIN + "import time\nif host == 'a':\n  try: muster.orbax.host_rows(1)\n  except muster.Deadline as error: print('LATE', error, flush=True)\n" + WORK
    first, _ = run(scene, "0.10.2", code, ["a", "b"], orbax=False)
    assert "LATE 1 of 2 processes have not called" in first and ": 1. Every process" in first, first


# A thread plays the replicator: it takes replicator.yaml away, and says that there is nothing to restore.
MULTI_TIER = """
import os, pathlib, sys, threading, time
import muster.orbax
directory = pathlib.Path(sys.argv[1]) / os.environ["MUSTER_PROCESS_ID"]
print("INFO", muster.orbax.write_jax_init_info(directory).read_text().split(), flush=True)
import jax
try: jax.config.update("jax_cpu_collectives_implementation", "gloo")
except AttributeError: pass
def replicate():
    order = directory / "replicator.yaml"
    while not order.exists():
        time.sleep(0.05)
    print("ORDER", " ".join(order.read_text().split()), flush=True)
    order.unlink()
    (directory / "job-s0-n0-w0.restore").touch()
threading.Thread(target=replicate, daemon=True).start()
from orbax.checkpoint.experimental.emergency.multi_tier_checkpointing import initialization
initialization.initialize_multi_tier_checkpointing(directory, num_slices=1, run_name="job")
print("ROWS", muster.orbax.install(60), flush=True)
""" + WORK


def test_multi_tier_checkpointing_learns_its_process_id_from_the_file(scene, orbax_release, tmp_path):
    server = scene.serve("--tasks", "2")
    start = [orbax_interpreter(orbax_release), "-c", MULTI_TIER, str(tmp_path)]
    # The ids are not those of the order in which they are started.
    programs = {n: scene.start(start, **place(server, n, 2), MUSTER_HOST_ID=f"h{n}") for n in (1, 0)}
    assert sums(programs.values()) == ["0 2 3 own service: True", "1 2 3 own service: False"]
    for process, program in programs.items():
        text = program.text()
        assert f"INFO ['{process}', '{server.grpc}']" in text, text
        assert f"node-rank: {process} nodes: 2" in text, text
        assert (tmp_path / str(process) / "jax-init-info.txt").read_text() == f"{process}\n{server.grpc}\n"
        assert not list((tmp_path / str(process)).glob(".jax-init-info*")), "no part of it is left"


def test_rows_follow_hosts_that_stayed_and_newcomers_take_what_is_left():
    hosts, rows = orbax._ordered([(("b", 0), [1]), (("a", 1), [2]), (("a", 0), [3])])
    assert (hosts, rows) == ([("a", 0), ("a", 1), ("b", 0)], [[3], [2], [1]])
    saved = [[10], [20], [30], [40]]
    was = [("a", 0), ("b", 0), ("c", 0), ("d", 0)]
    now = [("a", 0), ("aa", 0), ("ab", 0), ("d", 0)]
    assert orbax._aligned(saved, was, now) == [[10], [20], [30], [40]]
    now = [("c", 0), ("d", 0), ("e", 0), ("f", 0)]
    assert orbax._aligned(saved, was, now) == [[30], [40], [10], [20]]
    assert orbax._aligned(saved, was, now[:3]) == saved, "Orbax matches no hosts then"
    with pytest.raises(ClusterEnvError, match="processes 0 and 1 both say"):
        orbax._ordered([(("b", 0), [1]), (("b", 0), [2])])


def test_without_orbax_the_error_says_what_to_install():
    with pytest.raises(MusterError, match="install orbax-checkpoint"):
        orbax.install()
