"""Finds out which calls of the driver wait for work of other streams: one stream is held by a value in host memory, and each
call is made meanwhile by a second thread. Muster may make a call that waits only where nothing else is delayed by it."""

import ctypes as C
import mmap
import threading
import time

from cuda_driver import MIB, Cuda, IpcHandle
from processes import report

SIZE = 8 * MIB
cuda = Cuda()
mine, held = cuda.stream(), cuda.stream()
device, other = cuda.allocate(SIZE), cuda.allocate(SIZE)
page_locked = cuda.allocate_page_locked(SIZE)
gate_address = cuda.allocate_page_locked(4096)
gate = C.c_uint32.from_address(gate_address)
mappings = [mmap.mmap(-1, SIZE) for _ in range(2)]
for mapping in mappings:
    mapping[:] = b"\1" * SIZE
pageable, registered = [C.addressof((C.c_char * SIZE).from_buffer(mapping)) for mapping in mappings]
cuda.call("cuMemHostRegister_v2", registered, SIZE, 1)
exported = cuda.create(SIZE)
descriptor = cuda.export(exported)
made = {}


def keep(name, function, *arguments):
    """Returns an operation that stores what it makes, for the operation that ends it."""
    return lambda: made.__setitem__(name, function(*arguments))


def give(name, call, *arguments):
    """Returns an operation that passes on what an earlier one made."""
    return lambda: cuda.call(call, made[name], *arguments)


def finish(call, *arguments):
    """Returns an operation that queues work in a free stream and waits for its end."""

    def operation():
        cuda.call(call, *arguments, mine)
        cuda.synchronize(mine)

    return operation


OPERATIONS = {
    "copy to page-locked memory, and its end": finish("cuMemcpyDtoHAsync_v2", page_locked, device, SIZE),
    "copy from registered memory, and its end": finish("cuMemcpyHtoDAsync_v2", device, registered, SIZE),
    "copy from pageable memory, and its end": finish("cuMemcpyHtoDAsync_v2", device, pageable, SIZE),
    "copy within the device, and its end": finish("cuMemcpyDtoDAsync_v2", other, device, SIZE),
    "fill, and its end": finish("cuMemsetD8Async", other, 1, SIZE),
    "cuEventCreate": keep("event", cuda.event),
    "cuEventDestroy": give("event", "cuEventDestroy_v2"),
    "cuStreamCreate": keep("stream", cuda.stream),
    "cuStreamDestroy": give("stream", "cuStreamDestroy_v2"),
    "cuMemHostAlloc": keep("host", cuda.allocate_page_locked, SIZE),
    "cuMemFreeHost": give("host", "cuMemFreeHost"),
    "cuMemHostAlloc of 64 MiB": keep("host", cuda.allocate_page_locked, 64 * MIB),
    "cuMemFreeHost of 64 MiB": give("host", "cuMemFreeHost"),
    "cuMemHostRegister": lambda: cuda.call("cuMemHostRegister_v2", pageable, SIZE, 1),
    "cuMemHostUnregister": lambda: cuda.call("cuMemHostUnregister", pageable),
    "cuMemAlloc": keep("memory", cuda.allocate, SIZE),
    "cuMemFree": give("memory", "cuMemFree_v2"),
    "cuMemAlloc of 1 GiB": keep("memory", cuda.allocate, 1 << 30),
    "cuMemFree of 1 GiB": give("memory", "cuMemFree_v2"),
    "cuMemCreate": keep("handle", cuda.create, SIZE),
    "reserve, map, set access": lambda: made.__setitem__("address", cuda.map(made["handle"], SIZE)),
    "cuMemUnmap": give("address", "cuMemUnmap", SIZE),
    "cuMemAddressFree": give("address", "cuMemAddressFree", SIZE),
    "cuMemRelease": give("handle", "cuMemRelease"),
    "import of shared memory": keep("handle", cuda.import_handle, descriptor),
    "map of the import": lambda: made.__setitem__("address", cuda.map(made["handle"], SIZE)),
    "unmap of the import": give("address", "cuMemUnmap", SIZE),
    "release of the import": give("handle", "cuMemRelease"),
    "cuIpcGetMemHandle": lambda: cuda.new(IpcHandle, "cuIpcGetMemHandle", device),
    "cuStreamQuery of a free stream": lambda: cuda.call("cuStreamQuery", mine),
    "cuMemGetInfo": lambda: cuda.call("cuMemGetInfo_v2", C.byref(C.c_size_t()), C.byref(C.c_size_t())),
    "cuPointerGetAttribute": lambda: cuda.new(C.c_int, "cuPointerGetAttribute", 2, device),
}


def run(operation, outcome):
    try:
        cuda.make_current()
        began = time.perf_counter()
        operation()
        outcome.append(f"{1e6 * (time.perf_counter() - began):.0f} us")
    except RuntimeError as error:
        outcome.append(str(error))


waiting, free = [], []
for name, operation in OPERATIONS.items():
    gate.value = 0
    cuda.call("cuStreamWaitValue32_v2", held, gate_address, 1, 0)
    cuda.call("cuMemsetD8Async", other, 3, 16, held)
    outcome = []
    thread = threading.Thread(target=run, args=(operation, outcome), daemon=True)
    thread.start()
    thread.join(0.7)
    if thread.is_alive():
        waiting.append(name)
    else:
        free.append(f"{name} {outcome[0]}")
    gate.value = 1
    thread.join(5)
    cuda.synchronize(held)
report("wait for another stream:", ", ".join(waiting) or "none")
report("do not wait:", ", ".join(free))
