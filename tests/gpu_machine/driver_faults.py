"""Finds out what the driver says when memory of another process, or memory at all, is not there any more: imports whose owner
stays, frees or is killed; copies from freed memory, from no memory and beyond an end; a kernel that writes to no address. Each
case has processes of its own, because the last one ends a context."""

import ctypes
import signal
import socket
import subprocess
import sys
import time

from cuda_driver import MIB, Cuda, IpcHandle
from processes import kill, report, start

SIZE = 4 * MIB
CASES = ["import ipc stays", "import ipc frees", "import ipc killed", "import mapped stays", "import mapped killed",
         "freed", "unmapped", "beyond", "kernel"]


def own(kind, connection):
    """Owns memory of which another process has a handle, until that process closes the connection."""
    cuda = Cuda()
    if kind == "ipc":
        pointer = cuda.allocate(SIZE)
        cuda.fill(pointer, 7, SIZE)
        connection.sendall(bytes(cuda.new(IpcHandle, "cuIpcGetMemHandle", pointer).bytes))
        if connection.recv(1) == b"f":
            print("the owner frees:", cuda.name_of(cuda.try_call("cuMemFree_v2", pointer)), flush=True)
            connection.sendall(b"d")
    else:
        handle = cuda.create(SIZE)
        cuda.fill(cuda.map(handle, SIZE), 7, SIZE)
        socket.send_fds(connection, [b"x"], [cuda.export(handle)])
    connection.recv(1)


def import_memory(kind, owner_does):
    mine, owners = socket.socketpair()
    owner = start([sys.executable, __file__, "own", kind, str(owners.fileno())], pass_fds=(owners.fileno(),))
    owners.close()
    cuda = Cuda()
    stream = cuda.stream()
    if kind == "ipc":
        handle = IpcHandle.from_buffer_copy(mine.recv(64, socket.MSG_WAITALL))
        pointer = cuda.new(ctypes.c_uint64, "cuIpcOpenMemHandle_v2", handle, 1).value
    else:
        pointer = cuda.map(cuda.import_handle(socket.recv_fds(mine, 1, 1)[1][0]), SIZE)
    target = cuda.allocate(SIZE)
    cuda.fill(target, 1, SIZE)
    if owner_does == "frees":
        mine.sendall(b"f")
        mine.recv(1)
    elif owner_does == "killed":
        kill(owner, signal.SIGKILL)
        owner.wait()
        time.sleep(0.3)
    copy = cuda.try_call("cuMemcpyDtoDAsync_v2", target, pointer, SIZE, stream)
    end = cuda.try_call("cuStreamSynchronize", stream)
    right = cuda.read(target, SIZE, stream) == bytes([7]) * SIZE
    closed = f", close {cuda.name_of(cuda.try_call('cuIpcCloseMemHandle', pointer))}" if kind == "ipc" else ""
    report(f"import by {kind}, owner {owner_does}: copy {cuda.name_of(copy)}, its end {cuda.name_of(end)}, contents "
           f"{'right' if right else 'WRONG'}{closed}")


def bad_copy(case):
    cuda = Cuda()
    stream, target, source = cuda.stream(), cuda.allocate(64 * MIB), cuda.allocate(64 * MIB)
    size = 64 * MIB
    if case == "freed":
        cuda.call("cuMemFree_v2", source)
    elif case == "unmapped":
        source = 0x7F0000000000 + (1 << 44)
    else:
        source, size = cuda.allocate(MIB), 3 * MIB
    copy = cuda.try_call("cuMemcpyDtoDAsync_v2", target, source, size, stream)
    end = cuda.try_call("cuStreamSynchronize", stream)
    later = cuda.try_call("cuCtxSynchronize")
    report(f"copy from {case} memory: {cuda.name_of(copy)}, its end {cuda.name_of(end)}, the context {cuda.name_of(later)}")


def bad_kernel():
    cuda = Cuda()
    stream, other = cuda.stream(), cuda.stream()
    cuda.launch(b"fault", 0x100, stream)
    calls = [("its end", "cuStreamSynchronize", stream), ("another stream", "cuStreamSynchronize", other),
             ("the context", "cuCtxSynchronize")]
    report("a kernel writes to no address:", ", ".join(f"{what} {cuda.name_of(cuda.try_call(*call))}" for what, *call in calls))


case = sys.argv[1:]
if not case:
    for name in CASES:
        try:
            status = subprocess.run([sys.executable, __file__, *name.split()], timeout=20).returncode
        except subprocess.TimeoutExpired:
            status = "none: it did not end"
        if status:
            report(f"{name}: status {status}")
elif case[0] == "own":
    own(case[1], socket.socket(fileno=int(case[2])))
elif case[0] == "import":
    import_memory(case[1], case[2])
elif case[0] == "kernel":
    bad_kernel()
else:
    bad_copy(case[0])
