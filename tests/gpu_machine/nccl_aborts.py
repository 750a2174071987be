"""Finds out what NCCL does when work has to end early, without a framework: how long an abort or a revoke takes, when the stream is
free, and whether a byte of the destination changes afterwards. One rank that sends to itself runs on the packaged NCCL and on
NEW_NCCL, two ranks on one GPU on NEW_NCCL. As `nccl_aborts.py rank SCENARIO LIBRARY RANK FOLDER` it is one of the processes."""

import os
import struct
import sys
import threading
import time
import zlib

from cuda_driver import MIB, NOT_READY, Cuda
from nccl_library import Nccl, UniqueId
from processes import (TWO_RANKS_ON_ONE_GPU, find_packaged_nccl, kill, limit_life, log, put_file, report, show_log, start, wait,
                       wait_for_file)

BIG = int(os.environ.get("BIG_MIB", "1024")) * MIB


def ms(seconds):
    return f"{seconds * 1e3:.2f} ms" if isinstance(seconds, float) else str(seconds)


class Rank:
    def __init__(self, scenario, library, rank, folder):
        self.scenario, self.rank, self.peer, self.folder = scenario, rank, 1 - rank, folder
        self.cuda, self.nccl = Cuda(), Nccl(library)
        self.stream, self.reader = self.cuda.stream(), self.cuda.stream()
        self.communicator = None

    def file(self, name):
        return os.path.join(self.folder, name)

    def report(self, text):
        report(f"[{self.scenario}, NCCL {self.nccl.version}, rank {self.rank}] {text}")

    def create_alone(self):
        self.communicator = self.nccl.create(1, self.nccl.unique_id(), 0)

    def meet(self):
        """Creates the communicator of both ranks."""
        if self.rank == 0:
            put_file(self.file("id"), bytes(self.nccl.unique_id().bytes))
        if not wait_for_file(self.file("id"), 20):
            raise RuntimeError("rank 0 made no id")
        began = time.time()
        self.communicator = self.nccl.create(2, UniqueId.from_buffer_copy(open(self.file("id"), "rb").read()), self.rank)
        if self.rank == 0:
            self.report(f"communicator of two ranks: {ms(time.time() - began)}")

    def buffers(self, size, byte):
        source, target = self.cuda.allocate(size), self.cuda.allocate(size)
        self.cuda.fill(source, byte, size)
        self.cuda.fill(target, 0, size)
        return source, target

    def checksum(self, pointer, size):
        found = 0
        for at in range(0, size, 64 * MIB):
            found = zlib.crc32(self.cuda.read(pointer + at, min(64 * MIB, size - at), self.reader), found)
        return found

    def swap(self, source, target, size, peer):
        return self.nccl.swap(self.communicator, source, target, size, peer, self.stream)

    def end_early(self, title, event, call="ncclCommAbort", *arguments):
        """Reports when an abort or a revoke, called in a thread, returns, and when the event after the work happens."""
        before, returned = self.cuda.query(event), []

        def run():
            self.cuda.make_current()
            began = time.time()
            code = self.nccl.call(call, self.communicator, *arguments)
            returned.append(f"{code} in {ms(time.time() - began)}")

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        freed = self.cuda.wait_for(event, 10)
        thread.join(10)
        pending = "pending" if before == NOT_READY else "not pending"
        self.report(f"{title} (work {pending}): call {returned[0] if returned else 'does not return'}, stream free after {ms(freed)}")

    def alone(self):
        """One rank sends to itself."""
        self.create_alone()
        size = BIG // 4
        source, target = self.buffers(size, 0x5A)
        code = self.swap(source, target, size, 0)
        self.cuda.synchronize(self.stream)
        right = self.checksum(source, size) == self.checksum(target, size)
        first, last, rounds = self.cuda.event(True), self.cuda.event(True), 10
        self.cuda.record(first, self.stream)
        for _ in range(rounds):
            self.swap(source, target, size, 0)
        self.cuda.record(last, self.stream)
        self.cuda.synchronize(self.stream)
        rate = rounds * size / self.cuda.milliseconds(first, last) / 1e6
        self.report(f"send to itself, {size // MIB} MiB: {code}, contents {'right' if right else 'WRONG'}, {rate:.0f} GB/s")

        event = self.cuda.event()
        self.cuda.launch(b"wait", 3 * 10**9, self.stream)
        self.swap(source, target, size, 0)
        self.cuda.record(event, self.stream)
        time.sleep(0.3)
        self.end_early("abort 0.3 s into a kernel of 3 s that is before the group", event)

        self.create_alone()
        source, target = self.buffers(BIG, 0x77)
        for _ in range(40):
            self.swap(source, target, BIG, 0)
        self.cuda.record(event, self.stream)
        time.sleep(0.02)
        self.end_early(f"abort 20 ms into 40 x {BIG // MIB} MiB to itself", event)
        before = self.checksum(target, BIG)
        time.sleep(1)
        self.report("a second later: " + ("no byte changed" if before == self.checksum(target, BIG) else "BYTES CHANGED"))

    def killed(self):
        """Two ranks work together; then rank 1 is killed while rank 0 waits for it."""
        self.meet()
        count = MIB
        source, target = self.cuda.allocate(4 * count), self.cuda.allocate(4 * count)
        self.cuda.write(source, struct.pack("<f", self.rank + 1.0) * count, self.stream)
        code = self.nccl.all_reduce(self.communicator, source, target, count, self.stream)
        right = self.cuda.read(target, 4 * count, self.stream) == struct.pack("<f", 3.0) * count
        times = []
        for size in (2, count):
            began = time.time()
            for _ in range(20):
                self.nccl.all_reduce(self.communicator, source, target, size, self.stream)
            self.cuda.synchronize(self.stream)
            times.append(f"{4 * size} B {ms((time.time() - began) / 20)}")
        if self.rank == 0 or not right:
            self.report(f"all-reduce: {code}, sums {'right' if right else 'WRONG'}; {', '.join(times)} each")
        put_file(self.file(f"ready{self.rank}"))
        if self.rank == 1:
            time.sleep(60)
        event = self.cuda.event()
        self.nccl.all_reduce(self.communicator, source, target, count, self.stream)
        self.cuda.record(event, self.stream)
        put_file(self.file("pending"))
        wait_for_file(self.file("killed"), 10)
        began = time.time()
        while self.nccl.state(self.communicator) == 0 and self.cuda.query(event) == NOT_READY and time.time() - began < 8:
            time.sleep(0.001)
        self.report(f"{time.time() - began:.1f} s after the peer was killed: state {self.nccl.state(self.communicator)}, "
                    f"work {'still pending' if self.cuda.query(event) == NOT_READY else 'ended'}")
        self.end_early("abort after the peer's death", event)
        began = time.time()
        self.create_alone()
        self.report(f"a new communicator of the survivor: {ms(time.time() - began)}")

    def end_before_peer_calls(self, is_revoke):
        """Rank 0 ends a swap that rank 1 has not called; then rank 1 calls it."""
        self.meet()
        size = 64 * MIB
        source, target = self.buffers(size, 0x10 + self.rank)
        self.swap(source, target, size, self.peer)
        self.cuda.synchronize(self.stream)
        self.cuda.fill(target, 0, size)
        put_file(self.file(f"ready{self.rank}"))
        event = self.cuda.event()
        if self.rank == 1:
            wait_for_file(self.file("late"), 40)
            self.swap(source, target, size, self.peer)
            self.cuda.record(event, self.stream)
            self.cuda.wait_for(event, 2)
            put_file(self.file("called"))
            wait_for_file(self.file("end"), 20)
            self.end_early("abort by the late one", event)
            return
        wait_for_file(self.file("ready1"), 20)
        self.swap(source, target, size, self.peer)
        self.cuda.record(event, self.stream)
        time.sleep(1)
        name, call = ("revoke", ("ncclCommRevoke", 0)) if is_revoke else ("abort", ("ncclCommAbort",))
        self.end_early(f"{name} of a swap whose peer never calls", event, *call)
        checksums = {self.checksum(target, size)}
        if is_revoke:
            state, settled = self.nccl.settle(self.communicator, 10)
            self.report(f"state {state} after {ms(settled)} more")
        put_file(self.file("late"))
        wait_for_file(self.file("called"), 10)
        time.sleep(0.5)
        checksums.add(self.checksum(target, size))
        untouched = checksums == {zlib.crc32(bytes(size))}
        self.report(f"destination, the peer having called late: {'untouched' if untouched else 'WRITTEN'}")
        if is_revoke:
            self.end_early("abort after the revoke", event)
        put_file(self.file("end"))

    def aborted(self):
        self.end_before_peer_calls(False)

    def revoked(self):
        self.end_before_peer_calls(True)

    def broken(self):
        """Rank 0 aborts in the middle of large swaps."""
        self.meet()
        source, target = self.buffers(BIG, 0x30 + self.rank)
        self.swap(source, target, MIB, self.peer)
        self.cuda.synchronize(self.stream)
        put_file(self.file(f"ready{self.rank}"))
        wait_for_file(self.file(f"ready{self.peer}"), 20)
        event = self.cuda.event()
        for _ in range(4):
            self.swap(source, target, BIG, self.peer)
        self.cuda.record(event, self.stream)
        if self.rank == 1:
            self.cuda.wait_for(event, 3)
            put_file(self.file("seen"))
            wait_for_file(self.file("end"), 20)
            self.end_early("abort by the other side", event)
            return
        time.sleep(0.03)
        self.end_early(f"abort in the middle of 4 x {BIG // MIB} MiB", event)
        checksums = {self.checksum(target, BIG)}
        wait_for_file(self.file("seen"), 8)
        time.sleep(0.5)
        checksums.add(self.checksum(target, BIG))
        self.report("after the abort " + ("no byte changed" if len(checksums) == 1 else "BYTES CHANGED"))
        put_file(self.file("end"))


def drive(folder):
    new = os.environ.get("NEW_NCCL", "")
    plan = [("alone", "packaged", find_packaged_nccl(), 22), ("alone", "new", new, 22)]
    plan += [(scenario, "new", new, life) for scenario, life in (("killed", 30), ("aborted", 22), ("revoked", 22), ("broken", 25))]
    for scenario, which, library, life in plan:
        if not library:
            report(f"{scenario}: left out, there is no {which} NCCL")
            continue
        where = os.path.join(folder, f"{scenario}-{which}")
        env = {"NCCL_PROFILER_PLUGIN": "none", "NCCL_RAS_ENABLE": "0", "NCCL_DEBUG": "WARN", "LIFE_S": life}
        env |= {} if scenario == "alone" else TWO_RANKS_ON_ONE_GPU
        command = [sys.executable, __file__, "rank", scenario, library]
        logs = [os.path.join(where, f"rank{rank}.log") for rank in range(1 if scenario == "alone" else 2)]
        ranks = [start([*command, str(rank), where], log_file, env) for rank, log_file in enumerate(logs)]
        if scenario == "killed" and wait_for_file(os.path.join(where, "pending"), 15, ranks[0]):
            time.sleep(0.5)
            kill(ranks[1])
            put_file(os.path.join(where, "killed"))
        statuses = [wait(rank, life) for rank in ranks]
        for log_file in logs:
            show_log(log_file)
        if statuses != [0] * len(ranks) and (scenario, statuses) != ("killed", [0, -9]):
            report(f"{scenario}: statuses {statuses}")
        if scenario == "killed" and not os.path.exists(os.path.join(where, "ready0")):
            report("this NCCL does not run two ranks on one GPU: the other cases are left out")
            return


if sys.argv[1] == "rank":
    limit_life(int(os.environ["LIFE_S"]))
    scenario, library, rank, folder = sys.argv[2:]
    getattr(Rank(scenario, library, int(rank), folder), scenario)()
    log("done")
    sys.stdout.flush()
    os._exit(0)  # a communicator that hangs would delay the exit
drive(sys.argv[1])
