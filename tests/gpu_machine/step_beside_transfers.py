"""Measures how much a training step slows down beside transfers of GPU memory: ten products of matrices, alone and while another
process runs `muster transfer bench --memory gpu`."""

import os
import subprocess
import time

import torch

from processes import report, start, wait

left, right = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))


def step():
    for _ in range(10):
        torch.mm(left, right)
    torch.cuda.synchronize()


def measure(seconds):
    times, end = [], time.time() + seconds
    while time.time() < end:
        began = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - began))
    times.sort()
    return f"{times[len(times) // 2]:.2f} ms (p99 {times[len(times) * 99 // 100]:.2f} ms, {len(times)} steps)"


for _ in range(20):
    step()
report("a step alone:", measure(2))
for transport, size in (("auto", "64MiB"), ("tcp", "16MiB")):
    bench = start([os.environ["MUSTER"], "transfer", "bench", "--memory", "gpu", "--transport", transport, "--size", size, "--seconds",
                   "2", "--repeat", "1", "--json"], stdout=subprocess.PIPE, text=True)
    time.sleep(1.2)
    report(f"beside transfers of {size} by {transport}:", measure(2))
    if wait(bench, 25) is None:
        report("the transfers did not end")
    print(bench.stdout.read(), flush=True)
report("a step alone:", measure(1))
