"""Measures the driver: copies of page-locked and of pageable memory, copies within the GPU, the cost of making and registering
memory, and how long a copy takes when two processes copy in turns. Muster's own figures are compared with these."""

import ctypes as C
import mmap
import os
import sys
import time

from cuda_driver import MIB, Cuda
from processes import report, start, wait

COPIES = {"device to device": "cuMemcpyDtoDAsync_v2", "host to device": "cuMemcpyHtoDAsync_v2", "device to host": "cuMemcpyDtoHAsync_v2"}


def timed(function, *arguments):
    began = time.perf_counter()
    result = function(*arguments)
    return result, time.perf_counter() - began


def host_mapping(size):
    """Returns an address of ordinary memory whose pages are there, and what keeps them."""
    memory = mmap.mmap(-1, size)
    memory[:] = b"\1" * size
    return C.addressof((C.c_char * size).from_buffer(memory)), memory


def copies_from_host(cuda, stream):
    size = 256 * MIB
    device = cuda.allocate(size)
    pageable, memory = host_mapping(size)
    for kind, host in (("pageable", pageable), ("page-locked", cuda.allocate_page_locked(size))):
        for way, (to, source) in (("host to device", (device, host)), ("device to host", (host, device))):
            for _ in range(2):
                _, called = timed(cuda.call, COPIES[way], to, source, size, stream)
                _, waited = timed(cuda.synchronize, stream)
            total = called + waited
            report(f"{kind}, {way}, 256 MiB: call {1e3 * called:.2f} ms, done {1e3 * total:.2f} ms = {size / total / 1e9:.1f} GB/s")
    del memory


def making_memory(cuda):
    size = 1 << 30
    address, memory = host_mapping(size)
    _, register = timed(cuda.call, "cuMemHostRegister_v2", address, size, 1)
    _, unregister = timed(cuda.call, "cuMemHostUnregister", address)
    page_locked, allocate = timed(cuda.allocate_page_locked, size)
    handle, create = timed(cuda.create, size)
    _, mapped = timed(cuda.map, handle, size)
    costs = {"cuMemHostRegister": register, "cuMemHostUnregister": unregister, "cuMemHostAlloc": allocate,
             "cuMemCreate": create, "mapping it": mapped}
    report("1 GiB:", ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in costs.items()))
    cuda.call("cuMemFreeHost", page_locked)
    del memory


def copies_within_device(cuda, stream):
    event = cuda.event()
    for size in (4096, 65536, MIB, 8 * MIB, 32 * MIB, 128 * MIB):
        source, to = cuda.allocate(size), cuda.allocate(size)
        best_call = best = float("inf")
        for _ in range(50):
            began = time.perf_counter()
            _, called = timed(cuda.call, "cuMemcpyDtoDAsync_v2", to, source, size, stream)
            cuda.record(event, stream)
            while cuda.query(event):
                pass
            best, best_call = min(best, time.perf_counter() - began), min(best_call, called)
        report(f"within the device, {size} B: {1e6 * best:.1f} us (call {1e6 * best_call:.1f} us) = {size / best / 1e9:.1f} GB/s")


def copy_in_turns(way, turn_in, turn_out, is_first):
    """One of two processes: copies when the other has copied, 1,500 times."""
    cuda, size = Cuda(), 16384
    stream, event = cuda.stream(), cuda.event()
    device, other, host = cuda.allocate(size), cuda.allocate(size), cuda.allocate_page_locked(size)
    to, source = {"device to device": (other, device), "host to device": (device, host), "device to host": (host, device)}[way]
    if is_first:
        os.write(turn_out, b"x")
    times = []
    for _ in range(1500):
        os.read(turn_in, 1)
        began = time.perf_counter()
        cuda.call(COPIES[way], to, source, size, stream)
        cuda.record(event, stream)
        while cuda.query(event):
            pass
        times.append(time.perf_counter() - began)
        os.write(turn_out, b"x")
    times.sort()
    if is_first:
        report(f"two processes in turns, {way}, 16 KiB: {1e6 * times[750]:.1f} us (p99 {1e6 * times[1485]:.1f} us)")


def main():
    cuda = Cuda()
    stream = cuda.stream()
    copies_from_host(cuda, stream)
    making_memory(cuda)
    copies_within_device(cuda, stream)
    for way in COPIES:
        ends = [os.pipe(), os.pipe()]
        children = []
        for me in (0, 1):
            turn_in, turn_out = ends[me][0], ends[1 - me][1]
            command = [sys.executable, __file__, way, str(turn_in), str(turn_out), str(me)]
            children.append(start(command, pass_fds=(turn_in, turn_out)))
        if None in [wait(child, 15) for child in children]:
            report(f"two processes in turns, {way}: did not end")


if len(sys.argv) > 1:
    copy_in_turns(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "0")
else:
    main()
