"""Measures what the profiler plug-in costs: all-reduces without it, with it (calls alone), and with it and the times of the GPU. Both
ranks live in one process and use NEW_NCCL: two processes without MPS take turns on a GPU, which hides everything below
milliseconds. As `plugin_cost.py ranks` it is this process, which reads "SIZE ROUNDS" and answers with times."""

import ctypes as C
import json
import os
import statistics
import subprocess
import sys
import time

from cuda_driver import MIB, Cuda
from nccl_library import FLOAT, SUM, Nccl
from processes import TWO_RANKS_ON_ONE_GPU, Service, kill, limit_life, log, report, start

SIZES = [8, 64 << 10, MIB, 64 * MIB]
RANKS = range(2)


def serve_measurements():
    limit_life(70)
    cuda, nccl = Cuda(), Nccl(os.environ["NEW_NCCL"])
    unique_id, communicators = nccl.unique_id(), [C.c_void_p() for _ in RANKS]
    nccl.call("ncclGroupStart")
    codes = [nccl.call("ncclCommInitRank", C.byref(communicators[rank]), len(RANKS), unique_id, rank) for rank in RANKS]
    codes.append(nccl.call("ncclGroupEnd"))
    if any(codes):
        sys.exit(f"no communicator: {codes} {nccl.describe(codes[-1])}")
    streams = [cuda.stream() for _ in RANKS]
    buffers = [(cuda.allocate(SIZES[-1]), cuda.allocate(SIZES[-1])) for _ in RANKS]
    first, last = cuda.event(True), cuda.event(True)

    def all_reduce(count):
        nccl.call("ncclGroupStart")
        for rank in RANKS:
            nccl.call("ncclAllReduce", *buffers[rank], count, FLOAT, SUM, communicators[rank], streams[rank])
        nccl.call("ncclGroupEnd")

    def synchronize():
        for stream in streams:
            cuda.synchronize(stream)

    print("ready", flush=True)
    for line in sys.stdin:
        size, rounds = map(int, line.split())
        count = max(1, size // 4)
        for _ in range(3):
            all_reduce(count)
        synchronize()
        began = time.perf_counter()
        cuda.record(first, streams[0])
        for _ in range(rounds):
            all_reduce(count)
        cuda.record(last, streams[0])
        queued = time.perf_counter()
        synchronize()
        ended = time.perf_counter()
        single = []
        for _ in range(min(rounds, 50)):
            start_of_one = time.perf_counter()
            all_reduce(count)
            synchronize()
            single.append(time.perf_counter() - start_of_one)
        times = {"queue": (queued - began) / rounds, "all": (ended - began) / rounds, "gpu": cuda.milliseconds(first, last) / rounds / 1e3,
                 "alone": statistics.median(single)}
        print(json.dumps({name: seconds * 1e6 for name, seconds in times.items()}), flush=True)
    os._exit(0)


def ask(child, size, rounds):
    child.stdin.write(f"{size} {rounds}\n")
    child.stdin.flush()
    return answer(child)


def answer(child):
    """Returns the next answer of a child; NCCL's own lines are printed."""
    for line in child.stdout:
        if line.startswith(("{", "ready")):
            return line.strip()
        print(line, end="", flush=True)
    report("the ranks ended")
    sys.exit(1)


def drive(folder):
    os.makedirs(folder, exist_ok=True)
    service, plugin = Service(folder, "--job", "calls=2", "--job", "times=2"), os.environ["PLUGIN"]
    common = {**TWO_RANKS_ON_ONE_GPU, "NCCL_RAS_ENABLE": "0", "NCCL_DEBUG": "WARN", "MUSTER_COORDINATOR_ADDRESS": service.address,
              "MUSTER_PROCESS_ID": "0", "MUSTER_NUM_PROCESSES": "2"}
    variants = {"without": {"NCCL_PROFILER_PLUGIN": "none"}, "calls": {"NCCL_PROFILER_PLUGIN": plugin, "MUSTER_JOB": "calls"},
                "times": {"NCCL_PROFILER_PLUGIN": plugin, "MUSTER_JOB": "times", "MUSTER_NCCL_TIMING": "always"}}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    children = {name: start([sys.executable, __file__, "ranks"], env=common | env, **pipes) for name, env in variants.items()}
    for child in children.values():
        answer(child)
    plan = {}
    for size in SIZES:
        alone = json.loads(ask(children["without"], size, 5))["all"]
        plan[size] = max(5, min(200, int(0.8e6 / max(1.0, alone))))
    table = {(size, name): [] for size in SIZES for name in variants}
    for turn in range(5):  # in alternating order, so that drift meets all alike
        for size, rounds in plan.items():
            for name in list(variants)[:: -1 if turn % 2 else 1]:
                times = json.loads(ask(children[name], size, rounds))
                table[size, name].append(times)
                log(turn, size, name, times)
    for size, rounds in plan.items():
        parts = []
        for name in variants:
            medians = {kind: statistics.median(times[kind] for times in table[size, name]) for kind in ("queue", "all", "gpu", "alone")}
            parts.append(name + " " + " ".join(f"{kind} {us:.1f}" for kind, us in medians.items()))
        report(f"{size} B x {rounds}, medians of 5, us: {'; '.join(parts)}")
    for job in ("calls", "times"):
        found = service.get(f"/jobs/{job}/collectives").get("cliques", [{}])
        report(f"the job with {job}:", json.dumps(found[0].get("functions") if found else None)[:300])
    for child in children.values():
        kill(child)
    service.end()


if sys.argv[1] == "ranks":
    serve_measurements()
else:
    drive(sys.argv[1])
