"""What all peers share: two processes, the same sizes, seeded contents that are compared, and the same measurements.

A peer is a class with

    name, transport, settings      what it is, and which settings it was given, for the report
    __init__(self, sender)         in both processes, before any size
    meet(self, pipe)               exchange whatever is needed to connect
    arrange(self, shape, pipe)     make buffers; `self.memory` is a list of arrays of bytes, one for each buffer of each slot
    filled(self)                   optional: the contents have just been written, at the sender
    forget(self)                   optional: drop what has been received, where it is new memory each time
    launches(self, count, pipe)    move that many launches, `shape.in_flight` of them at a time;
                                   returns when its last byte was in place here, or is known to be in place there
    once(self, pipe)               one launch of one slot, alone; returns when it is known to be in place. If the sender knows
                                   it by a message of the receiver, it returns the time of the arrival, which that message has
    latency(self, seconds, pipe)   optional, at the sender, in place of `once`: the figures of one launch at a time, from round
    ping_pong(self, rounds)        trips, of which this is one side
    figures                        optional: figures that hold for no particular size
    close(self)                    optional: the end of both processes

All times are of the monotonic clock, which is one for all processes of a host.
"""

import argparse
import json
import multiprocessing
import time
import traceback
from typing import NamedTuple

import numpy as np

GAP = 64
PAGE = 4096
# Above this size, single transfers only repeat the throughput.
LATENCY_MAX = 1 << 20


class Shape(NamedTuple):
    size: int
    batch: int
    in_flight: int

    @classmethod
    def parse(cls, text):
        return cls(*map(int, text.split(":")))

    @property
    def stride(self):
        """As far apart as Muster's own buffers, so that none takes many for one."""
        if self.batch == 1:
            return self.size
        room = self.size + GAP
        return -(-room // PAGE) * PAGE if room >= PAGE else -(-room // 64) * 64


BASE = np.random.default_rng(20).integers(0, 2**64, 1 << 17, dtype=np.uint64)


def contents(size, seed):
    """Words that look like nothing else: a fixed sequence, to which every seed adds another number."""
    global BASE
    words = -(-size // 8)
    if len(BASE) < words:
        BASE = np.random.default_rng(20).integers(0, 2**64, words, dtype=np.uint64)
    with np.errstate(over="ignore"):
        made = BASE[:words] + np.uint64(seed * 0x9E3779B97F4A7C15 % 2**64)
    return made.view(np.uint8)[:size]


def buffers(shape):
    """Plain memory for all slots: one array for each buffer, and the arrays that they are parts of."""
    whole = [np.zeros(shape.batch * shape.stride, np.uint8) for _ in range(shape.in_flight)]
    parts = [w[n * shape.stride : n * shape.stride + shape.size] for w in whole for n in range(shape.batch)]
    return parts, whole


def fill(peer, shape, seed):
    for number, memory in enumerate(peer.memory):
        memory[:] = contents(shape.size, seed + number)


def spoil(peer, shape, seed):
    if hasattr(peer, "forget"):
        return peer.forget()
    for number, memory in enumerate(peer.memory):
        memory[:] = ~contents(shape.size, seed + number)


def differs(peer, shape, seed):
    if len(peer.memory) != shape.batch * shape.in_flight:
        return ["not all of it is there"]
    return [n for n, memory in enumerate(peer.memory) if not np.array_equal(memory, contents(shape.size, seed + n))]


def receiver(make, pipe):
    """Does what it is told until the pipe closes."""
    try:
        peer = make(False)
        peer.meet(pipe)
        shape = None
        while True:
            what, value = pipe.recv()
            if what == "arrange":
                shape = Shape(*value)
                peer.arrange(shape, pipe)
                answer = None
            elif what == "spoil":
                spoil(peer, shape, value)
                answer = None
            elif what == "launches":
                peer.launches(value, pipe)
                answer = time.monotonic_ns()
            elif what == "once":
                for _ in range(value):
                    peer.once(pipe)
                answer = None
            elif what == "toss":
                answer = peer.ping_pong(value)
            elif what == "check":
                answer = differs(peer, shape, value)[:3]
            elif what == "close":
                answer = peer.close()
            pipe.send((what, answer))
    except EOFError:
        pass
    except Exception:
        traceback.print_exc()
        raise


def expect(pipe, what):
    said, answer = pipe.recv()
    if said != what:
        raise RuntimeError(f"expected {what}, not {said}")
    return answer


def tell(pipe, what, value):
    pipe.send((what, value))
    return expect(pipe, what)


class Conductor:
    def __init__(self, peer, pipe, seconds):
        self.peer, self.pipe, self.seconds = peer, pipe, seconds
        self.seed = int.from_bytes(np.random.default_rng().bytes(4), "little") << 20

    def arrange(self, shape):
        self.shape = shape
        self.pipe.send(("arrange", tuple(shape)))
        self.peer.arrange(shape, self.pipe)
        expect(self.pipe, "arrange")

    def run(self, count):
        """Contents anew, launches, and a look at all that arrived. Seconds, and whether it was right."""
        self.seed += 1 << 16
        fill(self.peer, self.shape, self.seed)
        if hasattr(self.peer, "filled"):
            self.peer.filled()
        tell(self.pipe, "spoil", self.seed)
        self.pipe.send(("launches", count))
        began = time.monotonic_ns()
        self.peer.launches(count, self.pipe)
        ended = time.monotonic_ns()
        there = expect(self.pipe, "launches")
        # One-sided writes are complete at the sender; transfers in which the receiver takes part end there.
        ended = ended if self.peer.one_sided else there
        wrong = tell(self.pipe, "check", self.seed)
        return (ended - began) / 1e9, not wrong

    def throughput(self):
        count, right = 2 * self.shape.in_flight, True
        while True:
            took, good = self.run(count)
            right = right and good
            times = self.seconds / took
            if times <= 4:
                break
            count = max(int(count * min(times, 64) / 2), count + 1)
        count = max(int(count * times), self.shape.in_flight)
        took, good = self.run(count)
        return count * self.shape.size * self.shape.batch / took / 1e9, right and good

    def latency(self):
        """From the start of one transfer, alone, until it is in place. A message that only says so is not part of it."""
        if hasattr(self.peer, "latency"):
            return self.peer.latency(self.seconds, self.pipe)
        if self.shape.size * self.shape.batch > LATENCY_MAX:
            return {}
        times, until = [], time.monotonic() + self.seconds
        while len(times) < 5000 and (time.monotonic() < until or len(times) < 20):
            self.pipe.send(("once", 10))
            for _ in range(10):
                began = time.monotonic_ns()
                arrived = self.peer.once(self.pipe)
                times.append(((arrived or time.monotonic_ns()) - began) / 1e3)
            expect(self.pipe, "once")
        times = sorted(times[10:])
        return {"p50_us": times[len(times) // 2], "p99_us": times[int((len(times) - 1) * 0.99)]}


def main(make):
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", action="append", required=True, type=Shape.parse, help="SIZE:BATCH:IN_FLIGHT")
    parser.add_argument("--seconds", type=float, default=0.5)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    other = context.Process(target=receiver, args=(make, there), daemon=True)
    other.start()
    there.close()
    peer = make(True)
    peer.meet(here)
    conductor = Conductor(peer, here, arguments.seconds)
    for shape in arguments.shape:
        shape = getattr(peer, "shape_for", lambda shape: shape)(shape)
        conductor.arrange(shape)
        rate, right = conductor.throughput()
        alone = conductor.latency()
        line = {
            "peer": peer.name,
            "transport": peer.transport,
            "settings": peer.settings,
            "size_bytes": shape.size,
            "batch": shape.batch,
            "in_flight": shape.in_flight,
            "gbytes_per_second": rate,
            **getattr(peer, "figures", {}),
            **alone,
            "verified": right and alone.get("verified", True),
        }
        print(json.dumps(line), flush=True)
    if hasattr(peer, "close"):
        here.send(("close", None))
        peer.close()
        expect(here, "close")
    here.close()
    other.join(5)
    if other.is_alive():
        other.kill()
