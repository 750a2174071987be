"""jax.device_put from a device of one process to a device of the other, over JAX's sockets.

All processes call it with the same array; the receiver gets a new one each time.
"""

import os
import socket
import sys
import threading
import time

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import common  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

SOCKETS = int(os.environ.get("JAX_SOCKETS", "4"))
PATIENCE_S = 20


def free_address():
    """Returns an address of the loopback interface on which nothing listens. With port 0 JAX does not connect."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


class DevicePut:
    name = "jax.device_put"
    transport = "tcp"
    one_sided = False
    settings = f"jax {jax.__version__}, {SOCKETS} sockets on the loopback interface"

    def __init__(self, sender):
        self.sender = sender

    def meet(self, pipe):
        if self.sender:
            service = free_address()
            pipe.send(("service", service))
        else:
            service = common.expect(pipe, "service")
        jax.config.update("jax_cross_host_transfer_socket_address", free_address())
        jax.config.update("jax_cross_host_transport_addresses", ",".join(["127.0.0.1:0"] * SOCKETS))
        jax.distributed.initialize(service, 2, 0 if self.sender else 1)
        one, other = [[device for device in jax.devices() if device.process_index == process][0] for process in range(2)]
        self.here, self.there = [NamedSharding(Mesh(np.array([device]), ("d",)), PartitionSpec()) for device in (one, other)]

        self.try_out(pipe)

    def try_out(self, pipe):
        """Ends both processes if an array does not arrive: block_until_ready() has no deadline, and ignores signals."""
        self.shape, self.memory = common.Shape(1 << 10, 1, 1), [np.ones(1 << 10, np.uint8)]
        self.filled()
        there = threading.Event()

        def move():
            jax.block_until_ready(self.put(0))
            there.set()

        threading.Thread(target=move, daemon=True).start()
        if self.sender:
            arrived = common.expect(pipe, "arrived")
        else:
            arrived = there.wait(PATIENCE_S)
            pipe.send(("arrived", arrived))
        if not arrived:
            print(f"an array of 1 KiB has not arrived within {PATIENCE_S} s", file=sys.stderr, flush=True)
            os._exit(1)

    def shape_for(self, shape):
        return shape._replace(batch=min(shape.batch, 32))

    def arrange(self, shape, pipe):
        self.shape = shape
        self.memory, self.whole = common.buffers(shape)
        self.filled()

    def filled(self):
        def array(memory):
            parts = [jax.device_put(memory.copy(), self.here)] if self.sender else []
            shards = [shard.data for part in parts for shard in part.addressable_shards]
            return jax.make_array_from_single_device_arrays((self.shape.size,), self.here, shards, dtype=np.uint8)

        batch = self.shape.batch
        arrays = [array(memory) for memory in self.memory]
        self.arrays = [arrays[n : n + batch] for n in range(0, len(arrays), batch)]

    def forget(self):
        self.memory = []

    def put(self, slot):
        return jax.device_put(self.arrays[slot], self.there)

    def launches(self, count, pipe):
        slots, under_way, last = self.shape.in_flight, [], {}
        # The sender's own results are not defined when the bytes have moved, so the receiver tells it.
        wait = (lambda _: common.expect(pipe, "there")) if self.sender else self.told(pipe)
        for n in range(count):
            if len(under_way) == slots:
                wait(under_way.pop(0))
            last[n % slots] = self.put(n % slots)
            under_way.append(last[n % slots])
        for moved in under_way:
            wait(moved)
        if not self.sender:
            self.memory = [np.asarray(array) for slot in range(slots) for array in last[slot]]

    def told(self, pipe):
        def wait(moved):
            jax.block_until_ready(moved)
            pipe.send(("there", time.monotonic_ns()))

        return wait

    def once(self, pipe):
        moved = self.put(0)
        if self.sender:
            return common.expect(pipe, "there")
        self.told(pipe)(moved)

    def close(self):
        jax.distributed.shutdown()


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(__file__))
    common.main(DevicePut)
