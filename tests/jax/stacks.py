"""One process of a job that loads the helper for stacks, before it imports JAX.

    MUSTER_PROCESS_ID=I MUSTER_NUM_PROCESSES=N JAX_COORDINATOR_ADDRESS=HOST:PORT JAX_COORDINATOR_BIND_ADDRESS=127.0.0.1:0 \\
        stacks.py HELPER TASK

All processes wait at the barrier `train/step`, except TASK, which never leaves its function load_batch(). The helper learns
from JAX which task this is, because the variable is removed.
"""

import os
import sys
import threading
import urllib.request

sys.dont_write_bytecode = True
ME, COUNT = int(os.environ.pop("MUSTER_PROCESS_ID")), int(os.environ["MUSTER_NUM_PROCESSES"])
exec(urllib.request.urlopen(sys.argv[1]).read())

import jax
from jax._src import distributed


def load_batch() -> None:
    threading.Event().wait()


def train() -> None:
    if ME == int(sys.argv[2]):
        load_batch()
    distributed.global_state.client.wait_at_barrier("train/step", 600_000)


jax.distributed.initialize(num_processes=COUNT, process_id=ME)
print(f"EVENT registered task={ME}", flush=True)
train()
