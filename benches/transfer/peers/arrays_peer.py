"""Muster from Python: arrays that move between two JAX processes.

MUSTER_PEER=buffers: transfers from muster.Buffer to muster.Buffer, prepared once. =prepared: from arrays of JAX to muster.Buffer,
prepared once. =arrays: `send()` and `receive()` of arrays of JAX, each time a new one, as jax.device_put gives it.

Round trips are measured as `muster transfer bench` measures them: from a call of `launch()` until the other process goes on.
"""

import os
import re
import subprocess
import sys
import threading
import time

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import common  # noqa: E402
import jax  # noqa: E402
import muster  # noqa: E402
import muster.jax  # noqa: E402
import muster.transfer  # noqa: E402
import numpy as np  # noqa: E402
from muster.transfer import Receive, Send  # noqa: E402

MODE = os.environ.get("MUSTER_PEER", "buffers")
# The channels of what goes one way, of round trips there and back, and of the gibibyte beside a busy thread.
MOVES, THERE, BACK, LARGE = range(4)
STAMP = 8
ROUNDS_MAX = 20_000
GIB = 1 << 30


def serve():
    """Starts the service of the job. Returns its process and its address."""
    command = [sys.executable, "-m", "muster", "serve", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", "--tasks", "2"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for line in server.stdout:
        if found := re.match(r"\s+gRPC\s+(\S+)", line):
            threading.Thread(target=server.stdout.read, daemon=True).start()
            return server, found[1]
    raise RuntimeError("muster serve has not started")


class Slot:
    """The memory of one launch, and what launches it."""

    def __init__(self, engine, shape, peer, outgoing, channel, number):
        self.engine, self.shape, self.peer, self.outgoing, self.channel = engine, shape, peer, outgoing, channel
        self.keys = [number * shape.batch + n for n in range(shape.batch)]
        self.struct = jax.ShapeDtypeStruct((shape.size,), np.uint8)
        # JAX's own memory is what is sent, unless both sides have Buffers.
        self.of_jax = MODE == "arrays" or (MODE == "prepared" and outgoing)
        self.memory = [np.zeros(shape.size, np.uint8) if self.of_jax else muster.empty(shape.size, np.uint8) for _ in self.keys]
        self.arrays = []
        self.prepared = None
        self.renew()

    def renew(self):
        """Takes over what was written into the memory of a sender. An array of JAX never changes, so it is a new one."""
        if self.of_jax and self.outgoing:
            self.arrays = [jax.device_put(memory.copy()).block_until_ready() for memory in self.memory]
        if MODE != "arrays" and (self.prepared is None or self.of_jax):
            arrays = self.arrays or self.memory
            if self.prepared is not None:
                self.prepared.close()
            self.prepared = self.engine.prepare([self.transfer(*each) for each in zip(arrays, self.keys)], channel=self.channel)

    def transfer(self, array, key):
        return Send(array, self.peer, key) if self.outgoing else Receive(array, self.peer, key)

    def launch(self):
        if self.prepared is not None:
            return self.prepared.launch()
        if self.shape.batch > 1:
            arrays = self.arrays if self.outgoing else [self.struct] * self.shape.batch
            return self.engine.transfer([self.transfer(*each) for each in zip(arrays, self.keys)], channel=self.channel)
        if self.outgoing:
            return self.engine.send(self.arrays[0], self.peer, self.keys[0], channel=self.channel)
        return self.engine.receive(self.struct, self.peer, self.keys[0], channel=self.channel)

    def finish(self, transfer):
        """Waits until the launch is over; an array that was received is kept."""
        if MODE != "arrays" or self.outgoing:
            transfer.wait()
        else:
            got = transfer.result()
            self.arrays = got if isinstance(got, list) else [got]

    def views(self):
        """Returns the contents, to be written before and read after the transfers. A Buffer is not received into meanwhile."""
        if MODE == "arrays" and not self.outgoing and self.arrays:
            return [np.asarray(array) for array in self.arrays]
        return [np.frombuffer(memory, np.uint8) for memory in self.memory]


class Arrays:
    name = "Muster, arrays"
    transport = "shm" if MODE == "buffers" else "pvm"
    one_sided = False
    settings = f"jax {jax.__version__}, Python {sys.version.split()[0]}"

    def __init__(self, sender):
        self.sender = sender
        self.me = 0 if sender else 1
        self.server = None
        self.figures = {}

    def meet(self, pipe):
        if self.sender:
            self.server, service = serve()
            pipe.send(("service", service))
        else:
            service = common.expect(pipe, "service")
        muster.jax.initialize(service, 2, self.me)
        self.engine = muster.transfer.attach()
        if MODE == "buffers":
            loss = self.busy_thread(pipe)
            if self.sender:
                self.figures = {"thread_loss": loss}

    def slots(self, count, outgoing, channel):
        return [Slot(self.engine, self.shape, 1 - self.me, outgoing, channel, number) for number in range(count)]

    def arrange(self, shape, pipe):
        self.shape = shape
        self.moves = self.out = self.back = []
        self.moves = self.slots(shape.in_flight, self.sender, MOVES)
        mine, theirs = (THERE, BACK) if self.sender else (BACK, THERE)
        self.out, self.back = self.slots(2, True, mine), self.slots(2, False, theirs)

    @property
    def memory(self):
        return [view for slot in self.moves for view in slot.views()]

    def filled(self):
        for slot in self.moves:
            slot.renew()

    def forget(self):
        for slot in self.moves:
            if MODE == "arrays":
                slot.arrays = []
            for view in slot.views():
                view[:] = ~view

    def launches(self, count, pipe):
        under_way = [None] * len(self.moves)
        for n in range(count):
            at = n % len(under_way)
            if under_way[at] is not None:
                self.moves[at].finish(under_way[at])
            under_way[at] = self.moves[at].launch()
        for slot, transfer in zip(self.moves, under_way):
            if transfer is not None:
                slot.finish(transfer)

    def latency(self, seconds, pipe):
        """Round trips, one at a time, conducted by the sender."""
        here, there = self.toss(10, pipe)
        took = (here["arrived"][-1] - here["launched"][0]) / 10
        rounds = min(max(int(seconds * 1e9 / max(took, 1)), 10), ROUNDS_MAX)
        here, there = self.toss(rounds, pipe)
        # The first rounds are left out: the other side may not have been ready.
        ways = [b - a for a, b in list(zip(here["launched"], there["arrived"]))[2:]]
        ways += [b - a for a, b in list(zip(there["launched"], here["arrived"]))[2:]]
        halves = [(b - a) / 2 for a, b in list(zip(here["launched"], here["arrived"]))[2:]]
        calls = here["calls"] + there["calls"]
        at = lambda times, share: sorted(times)[round((len(times) - 1) * share)] / 1e3  # noqa: E731
        return {
            "p50_us": at(ways, 0.5),
            "p99_us": at(ways, 0.99),
            "half_round_trip_p50_us": at(halves, 0.5),
            "half_round_trip_p99_us": at(halves, 0.99),
            "launch_p50_us": at(calls, 0.5) if MODE != "arrays" else None,
            "cpu_us": (here["worked"] + there["worked"]) / (2 * rounds) / 1e3,
            "verified": here["right"] and there["right"],
        }

    def toss(self, rounds, pipe):
        pipe.send(("toss", rounds))
        here = self.ping_pong(rounds)
        return here, common.expect(pipe, "toss")

    def ping_pong(self, rounds):
        mine, theirs = (11, 22) if self.sender else (22, 11)
        for number, slot in enumerate(self.out):
            for view in slot.views():
                view[:] = common.contents(self.shape.size, mine + number)
            slot.renew()
        launched, arrived, calls, right = [], [], [], True
        # A Buffer may be written between its launches, an array of JAX never.
        stamps = [] if MODE != "buffers" else [slot.views()[0][:STAMP] for slot in self.out]
        worked = time.process_time_ns()
        expected = self.back[0].launch()
        for n in range(rounds):
            slot, coming = self.out[n % 2], self.back[n % 2]
            if stamps:
                stamps[n % 2][:] = n % 251
            following = self.back[(n + 1) % 2].launch() if n + 1 < rounds else None
            if not self.sender:
                coming.finish(expected)
                arrived.append(time.monotonic_ns())
            began = time.monotonic_ns()
            sent = slot.launch()
            calls.append(time.monotonic_ns() - began)
            launched.append(began)
            if self.sender:
                coming.finish(expected)
                arrived.append(time.monotonic_ns())
            slot.finish(sent)
            if stamps:
                right = right and coming.views()[0][0] == n % 251
            expected = following
        worked = time.process_time_ns() - worked
        for number, slot in enumerate(self.back[: min(rounds, 2)]):
            want = common.contents(self.shape.size, theirs + number)
            right = right and all(np.array_equal(view[STAMP:], want[STAMP:]) for view in slot.views())
        return {"launched": launched, "arrived": arrived, "calls": calls, "worked": worked, "right": bool(right)}

    def busy_thread(self, pipe):
        """Moves 1 GiB again and again beside a Python thread that counts. Returns the part of its time that the receiver's one
        could have run, but waited for the interpreter."""
        large = muster.empty(GIB, np.uint8)
        np.frombuffer(large, np.uint8)[:] = 1 if self.sender else 2
        way = Send(large, 1, "large") if self.sender else Receive(large, 0, "large")
        with self.engine.prepare([way], channel=LARGE) as prepared:
            prepared.launch().wait()
            done, found = threading.Event(), []
            counting = threading.Thread(target=count, args=(done, found))
            if not self.sender:
                counting.start()
            for _ in range(8):
                prepared.launch().wait()
            done.set()
        if self.sender:
            return common.expect(pipe, "busy")
        counting.join()
        if not (np.frombuffer(large, np.uint8) == 1).all():
            raise RuntimeError("the contents are wrong")
        pipe.send(("busy", found[0]))
        return None

    def close(self):
        jax.distributed.shutdown()
        if self.server is not None:
            self.server.terminate()
            self.server.wait()


def count(done, found):
    """Counts until it is told to stop, and finds which part of its time it neither ran nor waited for a processor: nothing but
    the interpreter makes it wait."""
    def worked():
        with open(f"/proc/self/task/{threading.get_native_id()}/schedstat") as file:
            return sum(map(int, file.read().split()[:2]))

    began, before, counted = time.monotonic_ns(), worked(), 0
    while not done.is_set():
        for _ in range(1000):
            counted += 1
    took = time.monotonic_ns() - began
    found.append(max(0.0, 1 - (worked() - before) / took))


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(__file__))
    common.main(Arrays)
