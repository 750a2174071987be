"""Uses everything that a JAX program gets from its coordination service, and checks each answer.

    MUSTER_PROCESS_ID=I MUSTER_NUM_PROCESSES=N JAX_COORDINATOR_ADDRESS=HOST:PORT JAX_COORDINATOR_BIND_ADDRESS=127.0.0.1:0 \\
        conformance.py [--bind HOST:PORT]

Run by every process of a job of two or more. Prints `EVENT check name=... took=...` for each part that holds and
`EVENT skipped name=... why=...` for what this JAX release does not have. Ends with exit code 0 after `EVENT shutdown`;
at the first mismatch with 1, after `EVENT mismatch` and a trace on standard error.
"""

import argparse
import contextlib
import inspect
import os
import sys
import time
import traceback

sys.dont_write_bytecode = True
import common
from common import client, event

import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

DEVICES_PER_PROCESS = 2
# Long enough for the slowest machine: only a service that loses a call makes anyone wait for it.
PATIENCE_MS = 60_000

ME = common.process_id()
COUNT = common.num_processes()
EVERYONE = list(range(COUNT))


def require(holds: bool, message: str) -> None:
    # Not `assert`, which python -O leaves out.
    if not holds:
        raise AssertionError(message)


def require_equal(what: str, actual, expected) -> None:
    require(actual == expected, f"{what}: expected {expected!r}, got {actual!r}")


@contextlib.contextmanager
def require_error(code: str, what: str):
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        require_equal(f"code of {what} ({error})", common.error_code(error), code)
    else:
        raise AssertionError(f"{what}: expected {code}, but it went through")


def meet(place: str) -> None:
    client().wait_at_barrier(f"conformance/{place}", PATIENCE_MS)


# --- What JAX itself builds upon the service -------------------------------------------------------------------------


def topology():
    """Creating the backend exchanges the topology through the key-value store."""
    require_equal("process index", jax.process_index(), ME)
    require_equal("process count", jax.process_count(), COUNT)
    require_equal("local devices", jax.local_device_count(), DEVICES_PER_PROCESS)
    owners = sorted(d.process_index for d in jax.devices())
    require_equal("owners of all devices", owners, sorted(EVERYONE * DEVICES_PER_PROCESS))


def psum():
    """Gloo's processes find each other through the key-value store."""
    mesh = Mesh(np.array(jax.devices()), ("devices",))
    mine = np.full(DEVICES_PER_PROCESS, ME + 1, dtype=np.float32)
    values = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("devices")), mine)
    total = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, PartitionSpec()))(values)
    require_equal("sum over all processes", float(total), float(DEVICES_PER_PROCESS * COUNT * (COUNT + 1) / 2))


def sync_global_devices():
    for i in range(3):
        multihost_utils.sync_global_devices(f"conformance {i}")


# --- Key-value store ------------------------------------------------------------------------------------------------


def key_value_get_waits_for_set():
    if ME == 0:
        # The others' calls are most likely waiting by then. Either order is right; this one is the harder.
        time.sleep(0.3)
        client().key_value_set("conformance/late", "worth the wait")
    require_equal("value", client().blocking_key_value_get("conformance/late", PATIENCE_MS), "worth the wait")


def key_value_get_times_out():
    began = time.monotonic()
    with require_error("DEADLINE_EXCEEDED", "a get of a key that never comes"):
        client().blocking_key_value_get("conformance/never", 300)
    require(time.monotonic() - began >= 0.3, "the get gave up before its time")


def key_value_try_get():
    with require_error("NOT_FOUND", "a try_get of a missing key"):
        client().key_value_try_get("conformance/missing")
    client().key_value_set(f"conformance/own/{ME}", "mine")
    require_equal("value", client().key_value_try_get(f"conformance/own/{ME}"), "mine")


def key_value_holds_any_bytes():
    # The last is larger than a gRPC message may be by default, and than a flow-control window.
    values = {"empty": b"", "zeros": bytes(3), "every": bytes(range(256)), "large": os.urandom(6 << 20)}
    for name, value in values.items():
        key = f"conformance/bytes/{ME}/{name}"
        client().key_value_set_bytes(key, value)
        require(client().key_value_try_get_bytes(key) == value, f"{name}: try_get returned other bytes than were set")
        waited = client().blocking_key_value_get_bytes(key, PATIENCE_MS)
        require(waited == value, f"{name}: get returned other bytes than were set")
        client().key_value_delete(key)


def key_value_set_twice():
    key = f"conformance/once/{ME}"
    client().key_value_set(key, "first")
    with require_error("ALREADY_EXISTS", "a second insert of one key"):
        client().key_value_set(key, "second")
    require_equal("value after the refusal", client().key_value_try_get(key), "first")
    client().key_value_set(key, "third", allow_overwrite=True)
    require_equal("value after the overwrite", client().key_value_try_get(key), "third")


def key_value_has_one_winner():
    """All insert the same key at once: one succeeds, and everybody agrees on who it was."""
    meet("race")
    won = True
    try:
        client().key_value_set("conformance/race", str(ME))
    except jax.errors.JaxRuntimeError as error:
        require_equal("code for a loser", common.error_code(error), "ALREADY_EXISTS")
        won = False
    winner = int(client().key_value_try_get("conformance/race"))
    require_equal("having won", won, winner == ME)


def key_value_dir_get():
    client().key_value_set(f"conformance/dir/{ME}", f"value {ME}")
    client().key_value_set(f"conformance/dir/deep/{ME}", f"deep {ME}")
    meet("dir written")
    expected = [(f"conformance/dir/{i}", f"value {i}") for i in EVERYONE]
    expected += [(f"conformance/dir/deep/{i}", f"deep {i}") for i in EVERYONE]
    expected.sort()
    require_equal("directory", client().key_value_dir_get("conformance/dir"), expected)
    require_equal("directory asked for with slashes", client().key_value_dir_get("/conformance//dir/"), expected)
    require_equal("missing directory", client().key_value_dir_get("conformance/no such"), [])
    # A name that merely begins alike is not inside the directory.
    require_equal("prefix that is no directory", client().key_value_dir_get("conformance/di"), [])


def key_value_delete():
    root = f"conformance/tree/{ME}"
    client().key_value_set(root, "root")
    client().key_value_set(f"{root}/leaf", "leaf")
    client().key_value_set(f"{root}-sibling", "stays")
    client().key_value_delete(root)
    for gone in (root, f"{root}/leaf"):
        with require_error("NOT_FOUND", f"a try_get of the deleted {gone}"):
            client().key_value_try_get(gone)
    require_equal("sibling", client().key_value_try_get(f"{root}-sibling"), "stays")
    client().key_value_delete(root)  # deleting what is not there is no error


def key_value_increment():
    if not hasattr(client(), "key_value_increment"):
        return "no key_value_increment in this release"
    rounds = 20
    seen = [client().key_value_increment("conformance/counter", ME + 1) for _ in range(rounds)]
    require(seen == sorted(set(seen)), f"a counter that is only added to went {seen}")
    meet("counted")
    require_equal("total", client().key_value_try_get("conformance/counter"), str(rounds * COUNT * (COUNT + 1) // 2))
    key = f"conformance/not a number/{ME}"
    client().key_value_set(key, "abc")
    with require_error("FAILED_PRECONDITION", "an increment of a text"):
        client().key_value_increment(key, 1)


# --- Barriers and liveness --------------------------------------------------------------------------------------------


def barrier_of_all():
    """Nobody leaves before the last has come, also when an id is used again."""
    for i in range(3):
        if ME == i % COUNT:
            time.sleep(0.1)
        client().key_value_set(f"conformance/arrived/{i}/{ME}", "")
        client().wait_at_barrier("conformance/again", PATIENCE_MS)
        require_equal("arrivals", len(client().key_value_dir_get(f"conformance/arrived/{i}")), COUNT)


def barrier_of_some():
    """A barrier of a subset passes while the last process is kept from ever joining it."""
    members = EVERYONE[:-1]
    if ME in members:
        client().wait_at_barrier("conformance/some", PATIENCE_MS, members)
        if ME == 0:
            client().key_value_set("conformance/some passed", "")
    else:
        client().blocking_key_value_get("conformance/some passed", PATIENCE_MS)


def barrier_times_out():
    if ME == 0:
        began = time.monotonic()
        with require_error("DEADLINE_EXCEEDED", "a barrier that the others never reach"):
            client().wait_at_barrier("conformance/alone", 500)
        require(time.monotonic() - began >= 0.5, "the barrier gave up before its time")


def barrier_of_others():
    """A barrier is refused to those who are not in it."""
    if ME == 0:
        with require_error("INVALID_ARGUMENT", "a barrier of others"):
            client().wait_at_barrier("conformance/others", PATIENCE_MS, EVERYONE[1:])


def get_live_nodes():
    live = client().get_live_nodes(EVERYONE)
    require_equal("live nodes", sorted(live), EVERYONE)
    if isinstance(live, dict):  # releases to 0.6.2 return the ids alone
        require_equal("live nodes asked again, with incarnations", client().get_live_nodes(EVERYONE), live)
        require_equal("number of distinct incarnations", len(set(live.values())), COUNT)


def live_devices():
    if inspect.isfunction(multihost_utils.live_devices):  # releases to 0.6.2; a context manager in later ones
        live = multihost_utils.live_devices(jax.devices())
    else:
        with multihost_utils.live_devices(jax.devices()) as live:
            pass
    require_equal("live devices", sorted(d.id for d in live), sorted(d.id for d in jax.devices()))


CHECKS = [
    topology,
    psum,
    sync_global_devices,
    key_value_get_waits_for_set,
    key_value_get_times_out,
    key_value_try_get,
    key_value_holds_any_bytes,
    key_value_set_twice,
    key_value_has_one_winner,
    key_value_dir_get,
    key_value_delete,
    key_value_increment,
    barrier_of_all,
    barrier_of_some,
    barrier_times_out,
    barrier_of_others,
    get_live_nodes,
    live_devices,
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    common.add_arguments(parser)
    args = parser.parse_args()
    require(COUNT >= 2, "conformance needs two processes or more")

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_num_cpu_devices", DEVICES_PER_PROCESS)
    common.initialize(args)
    for check in CHECKS:
        name = check.__name__
        began = time.monotonic()
        try:
            why_not = check()
            # Keeps one part's laggards out of the next, and makes a process that failed the previous part noticed here.
            meet(f"after {name}")
        except Exception as error:
            event("mismatch", name=name, message=str(error))
            traceback.print_exc()
            # At once: an orderly exit would wait in the shutdown barrier for processes that wait for this one.
            sys.stderr.flush()
            os._exit(1)
        if why_not:
            event("skipped", name=name, why=why_not)
        else:
            event("check", name=name, took=time.monotonic() - began)
    common.shutdown()


if __name__ == "__main__":
    main()
