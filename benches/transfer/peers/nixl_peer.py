"""NIXL over UCX: one-sided writes, prepared once and posted again and again.

MUSTER_PEER=shm: all that UCX knows for one host (it takes process memory through the kernel); =tcp: TCP on the loopback interface only.

As it comes, an agent has a progress thread and handles errors of its peer. NIXL_PROGRESS=0 and NIXL_ERRORS=none make it as fast as it
gets on few cores: whoever uses it has to poll on both sides, and is not told of a peer that has gone.
"""

import os
import sys

TRANSPORT = os.environ.get("MUSTER_PEER", "shm")
PROGRESS = os.environ.get("NIXL_PROGRESS", "1") == "1"
SETTINGS = {}
if TRANSPORT == "tcp":
    # Without the device it would stripe over the loopback interface and any other one.
    SETTINGS |= {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"}
SETTINGS |= {"NIXL_LOG_LEVEL": "ERROR", "UCX_LOG_LEVEL": "error"}
os.environ.update(SETTINGS)

import common  # noqa: E402
from nixl._api import nixl_agent, nixl_agent_config  # noqa: E402


class Nixl:
    name = "NIXL"
    transport = TRANSPORT
    one_sided = True

    def __init__(self, sender):
        self.sender = sender
        self.me = "sender" if sender else "receiver"
        # A progress thread occupies one of the cores that the copy needs.
        threaded = PROGRESS
        self.agent = nixl_agent(self.me, nixl_agent_config(enable_prog_thread=threaded, backends=[]))
        errors = os.environ.get("NIXL_ERRORS", "peer")
        self.agent.create_backend("UCX", {"ucx_error_handling_mode": errors})
        self.settings = f"NIXL {version()}, UCX, progress thread {'on' if threaded else 'off'}, error handling {errors}, " + (
            "UCX_TLS=tcp UCX_NET_DEVICES=lo" if TRANSPORT == "tcp" else "UCX's own choice of shared memory and CMA"
        )
        self.registered = None
        self.handles = []

    def meet(self, pipe):
        pass

    def arrange(self, shape, pipe):
        for handle in self.handles:
            self.agent.release_xfer_handle(handle)
        self.handles = []
        if self.registered is not None:
            self.agent.deregister_memory(self.registered)
            if self.sender:
                self.agent.remove_remote_agent(self.other)
        self.memory, self.whole = common.buffers(shape)
        self.shape, self.next = shape, 0
        places = [(w.ctypes.data, w.nbytes, 0, "") for w in self.whole]
        self.registered = self.agent.register_memory(places, "DRAM")
        mine = [(m.ctypes.data, m.nbytes, 0) for m in self.memory]
        if not self.sender:
            pipe.send(("place", (self.agent.get_agent_metadata(), mine)))
            # UCX makes its connections only while both sides make progress.
            self.attend(pipe, connecting=True)
            return
        metadata, theirs = common.expect(pipe, "place")
        self.other = self.agent.add_remote_agent(metadata)
        if isinstance(self.other, bytes):
            self.other = self.other.decode()
        self.agent.make_connection(self.other)
        for slot in range(shape.in_flight):
            at = slice(slot * shape.batch, (slot + 1) * shape.batch)
            local = self.agent.get_xfer_descs(mine[at], "DRAM")
            remote = self.agent.get_xfer_descs(theirs[at], "DRAM")
            self.handles.append(self.agent.initialize_xfer("WRITE", local, remote, self.other))
        for handle in self.handles:
            self.post(handle)
            self.wait(handle)
        pipe.send(("arranged", None))

    def attend(self, pipe, connecting=False):
        """Waits for the sender. Over TCP a receiver without a progress thread must make progress itself meanwhile."""
        if connecting or (TRANSPORT == "tcp" and not PROGRESS):
            while not pipe.poll(0):
                self.agent.update_notifs()
                os.sched_yield()
        pipe.recv()

    def post(self, handle):
        if self.agent.transfer(handle) == "ERR":
            raise RuntimeError("posting failed")

    def wait(self, handle):
        while (state := self.agent.check_xfer_state(handle)) != "DONE":
            if state == "ERR":
                raise RuntimeError("a transfer failed")
            # The receiver can only poll; on few cores polling is faster if it yields to others.
            os.sched_yield()

    def launches(self, count, pipe):
        if not self.sender:
            self.attend(pipe)
            return
        busy = [False] * len(self.handles)
        for n in range(count):
            at = n % len(self.handles)
            if busy[at]:
                self.wait(self.handles[at])
            self.post(self.handles[at])
            busy[at] = True
        for at, handle in enumerate(self.handles):
            if busy[at]:
                self.wait(handle)
        pipe.send(("over", None))

    def once(self, pipe):
        if self.sender:
            self.post(self.handles[0])
            self.wait(self.handles[0])
            self.next += 1
            if self.next % 10 == 0:
                pipe.send(("over", None))
        else:
            self.next += 1
            if self.next % 10 == 0:
                self.attend(pipe)


def version():
    from importlib.metadata import version

    return version("nixl")


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(__file__))
    common.main(Nixl)
