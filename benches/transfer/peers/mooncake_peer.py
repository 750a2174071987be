"""Mooncake's transfer engine over TCP: one-sided writes, with connections that are kept."""

import os
import sys

# Without the pool every transfer opens a connection of its own.
os.environ.setdefault("MC_TCP_ENABLE_CONNECTION_POOL", "1")
# The fastest here of 64 KiB (its default), 256 KiB and 1 MiB.
os.environ.setdefault("MC_TCP_SLICE_SIZE", "262144")
os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
os.environ.setdefault("GLOG_minloglevel", "3")
os.environ.setdefault("MC_FORCE_TCP", "1")

import common  # noqa: E402
from mooncake.engine import TransferEngine  # noqa: E402


class Mooncake:
    name = "Mooncake"
    transport = "tcp"
    one_sided = True

    def __init__(self, sender):
        self.sender = sender
        self.engine = TransferEngine()
        if self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
            raise RuntimeError("it does not start")
        slice_size = os.environ["MC_TCP_SLICE_SIZE"]
        pool = "on" if os.environ["MC_TCP_ENABLE_CONNECTION_POOL"] == "1" else "off"
        self.settings = f"mooncake-transfer-engine {version()}, tcp, connection pool {pool}, slice size {slice_size}"
        self.whole = []

    def meet(self, pipe):
        if self.sender:
            self.other = common.expect(pipe, "here")
        else:
            pipe.send(("here", f"127.0.0.1:{self.engine.get_rpc_port()}"))

    def arrange(self, shape, pipe):
        for whole in self.whole:
            self.engine.unregister_memory(whole.ctypes.data)
        self.shape = shape
        self.memory, self.whole = common.buffers(shape)
        for whole in self.whole:
            if self.engine.register_memory(whole.ctypes.data, whole.nbytes) != 0:
                raise RuntimeError("memory cannot be registered")
        self.mine = [m.ctypes.data for m in self.memory]
        if self.sender:
            self.theirs = common.expect(pipe, "place")
        else:
            pipe.send(("place", self.mine))

    def post(self, slot):
        at = slice(slot * self.shape.batch, (slot + 1) * self.shape.batch)
        sizes = [self.shape.size] * self.shape.batch
        batch = self.engine.batch_transfer_async_write(self.other, self.mine[at], self.theirs[at], sizes)
        if batch == 0:
            raise RuntimeError("a transfer was refused")
        return batch

    def wait(self, batches):
        if batches and self.engine.get_batch_transfer_status(batches) != 0:
            raise RuntimeError("a transfer failed")

    def launches(self, count, pipe):
        if not self.sender:
            return
        slots = self.shape.in_flight
        under_way = []
        for n in range(count):
            if len(under_way) == slots:
                self.wait([under_way.pop(0)])
            under_way.append(self.post(n % slots))
        self.wait(under_way)

    def once(self, pipe):
        if self.sender:
            count = self.shape.batch
            sizes = [self.shape.size] * count
            done = self.engine.batch_transfer_sync_write(self.other, self.mine[:count], self.theirs[:count], sizes)
            if done != 0:
                raise RuntimeError("a transfer failed")


def version():
    from importlib.metadata import version

    return version("mooncake-transfer-engine-non-cuda")


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(__file__))
    common.main(Mooncake)
