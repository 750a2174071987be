"""jax.experimental.transfer: the receiver pulls arrays that the sender offers.

What it pulls becomes a new array each time: it has no way to receive into memory that is there.
"""

import os
import sys
import time

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import common  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import transfer  # noqa: E402
from jax.sharding import SingleDeviceSharding  # noqa: E402

SOCKETS = int(os.environ.get("JAX_SOCKETS", "4"))


class Jax:
    name = "jax.experimental.transfer"
    transport = "tcp"
    one_sided = False
    settings = f"jax {jax.__version__}, {SOCKETS} sockets on the loopback interface"

    def __init__(self, sender):
        self.sender = sender
        self.device = jax.devices()[0]
        addresses = ["127.0.0.1:0"] * SOCKETS
        self.server = transfer.start_transfer_server(self.device.client, "127.0.0.1:0", addresses)
        self.uuid = 0

    def shape_for(self, shape):
        # One request takes few arrays.
        return shape._replace(batch=min(shape.batch, 32))

    def meet(self, pipe):
        if self.sender:
            pipe.send(("here", self.server.address()))
        else:
            self.connection = self.server.connect(common.expect(pipe, "here"))

    def arrange(self, shape, pipe):
        self.shape = shape
        self.memory, self.whole = common.buffers(shape)
        self.spec = [
            jax.ShapeDtypeStruct((shape.size,), np.uint8, sharding=SingleDeviceSharding(self.device))
            for _ in range(shape.batch)
        ]
        if self.sender:
            self.filled()

    def filled(self):
        batch = self.shape.batch
        arrays = [jax.device_put(m.copy(), self.device) for m in self.memory]
        jax.block_until_ready(arrays)
        self.arrays = [arrays[n : n + batch] for n in range(0, len(arrays), batch)]

    def forget(self):
        self.memory = []

    def launches(self, count, pipe):
        slots = self.shape.in_flight
        if self.sender:
            for n in range(count):
                self.uuid += 1
                self.server.await_pull(self.uuid, self.arrays[n % slots])
            return
        under_way, last = [], {}
        for n in range(count):
            if len(under_way) == slots:
                jax.block_until_ready(under_way.pop(0))
            self.uuid += 1
            pulled = self.connection.pull(self.uuid, self.spec)
            under_way.append(pulled)
            last[n % slots] = pulled
        jax.block_until_ready(under_way)
        self.memory = [np.asarray(array) for slot in range(slots) for array in last[slot]]

    def once(self, pipe):
        self.uuid += 1
        if self.sender:
            self.server.await_pull(self.uuid, self.arrays[0])
            return common.expect(pipe, "pulled")
        jax.block_until_ready(self.connection.pull(self.uuid, self.spec))
        pipe.send(("pulled", time.monotonic_ns()))


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(__file__))
    common.main(Jax)
