"""The CUDA driver through ctypes: the calls that Muster uses, and a kernel that waits. Needs no package. Integers are passed
as 64 bits, which 64-bit platforms accept for narrower parameters too."""

import ctypes as C
import struct
import time

MIB = 1 << 20
NOT_READY = 600
POSIX_FILE = 1  # the kind of a handle that is a file descriptor
# `wait`: runs for a number of nanoseconds. `fault`: writes to an address that is not mapped.
KERNELS = b""".version 7.0
.target sm_70
.address_size 64
.visible .entry wait(.param .u64 ns)
{
 .reg .u64 %rd<5>; .reg .pred %p<2>;
 ld.param.u64 %rd2, [ns];
 mov.u64 %rd1, %globaltimer;
L:
 mov.u64 %rd3, %globaltimer;
 sub.u64 %rd4, %rd3, %rd1;
 setp.lt.u64 %p1, %rd4, %rd2;
 @%p1 bra L;
 ret;
}
.visible .entry fault(.param .u64 address)
{
 .reg .u64 %rd<2>; .reg .u32 %r<2>;
 ld.param.u64 %rd1, [address];
 mov.u32 %r1, 1;
 st.global.u32 [%rd1], %r1;
 ret;
}
\0"""


class IpcHandle(C.Structure):
    _fields_ = [("bytes", C.c_ubyte * 64)]


class Cuda:
    """The first GPU with its primary context, current in the thread that opened it."""

    def __init__(self):
        self.library = C.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        device = C.c_int()
        self.call("cuDeviceGet", C.byref(device), 0)
        self.context = self.new(C.c_void_p, "cuDevicePrimaryCtxRetain", device)
        self.make_current()

    def try_call(self, name, *arguments):
        """Calls the driver and returns its code."""
        return getattr(self.library, name)(*(C.c_size_t(a) if isinstance(a, int) else a for a in arguments))

    def call(self, name, *arguments):
        code = self.try_call(name, *arguments)
        if code:
            raise RuntimeError(f"{name}: {self.name_of(code)}")

    def new(self, kind, name, *arguments):
        """Calls a function whose first argument receives what it makes."""
        made = kind()
        self.call(name, C.byref(made), *arguments)
        return made

    def name_of(self, code):
        text = C.c_char_p()
        known = self.library.cuGetErrorName(code, C.byref(text)) == 0
        return text.value.decode().removeprefix("CUDA_").removeprefix("ERROR_") if known else str(code)

    def make_current(self):
        self.call("cuCtxSetCurrent", self.context)

    def allocate(self, size):
        return self.new(C.c_uint64, "cuMemAlloc_v2", size).value

    def allocate_page_locked(self, size):
        return self.new(C.c_void_p, "cuMemHostAlloc", size, 0).value

    def stream(self):
        return self.new(C.c_void_p, "cuStreamCreate", 1)

    def event(self, timing=False):
        return self.new(C.c_void_p, "cuEventCreate", 0 if timing else 2)

    def record(self, event, stream):
        self.call("cuEventRecord", event, stream)

    def query(self, event):
        return self.try_call("cuEventQuery", event)

    def synchronize(self, stream):
        self.call("cuStreamSynchronize", stream)

    def milliseconds(self, first, second):
        return self.new(C.c_float, "cuEventElapsedTime", first, second).value

    def wait_for(self, event, seconds):
        """Returns the seconds until the event has happened, None if it has not, or the name of an error."""
        began = time.time()
        while (code := self.query(event)) == NOT_READY:
            if time.time() - began > seconds:
                return None
            time.sleep(0.0002)
        return self.name_of(code) if code else time.time() - began

    def fill(self, pointer, byte, size):
        stream = self.stream()
        self.call("cuMemsetD8Async", pointer, byte, size, stream)
        self.synchronize(stream)
        self.call("cuStreamDestroy_v2", stream)

    def write(self, pointer, data, stream):
        self.call("cuMemcpyHtoDAsync_v2", pointer, C.c_char_p(bytes(data)), len(data), stream)
        self.synchronize(stream)

    def read(self, pointer, size, stream):
        """Reads memory of the GPU through a stream, so that work of other streams is not waited for."""
        host = bytearray(size)
        self.call("cuMemcpyDtoHAsync_v2", (C.c_char * size).from_buffer(host), pointer, size, stream)
        self.synchronize(stream)
        return host

    def launch(self, kernel, value, stream):
        """Launches one of KERNELS with its argument."""
        module = self.new(C.c_void_p, "cuModuleLoadData", KERNELS)
        function = self.new(C.c_void_p, "cuModuleGetFunction", module, kernel)
        argument = C.c_uint64(value)
        arguments = (C.c_void_p * 1)(C.addressof(argument))
        self.call("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, stream, arguments, None)

    def create(self, size):
        """Creates memory that other processes may map."""
        # CUmemAllocationProp: pinned, the kind of its handle, of device 0.
        properties = struct.pack("<iiii2Q", 1, POSIX_FILE, 1, 0, 0, 0)
        return self.new(C.c_uint64, "cuMemCreate", size, C.c_char_p(properties), 0).value

    def map(self, handle, size):
        address = self.new(C.c_uint64, "cuMemAddressReserve", size, 0, 0, 0).value
        self.call("cuMemMap", address, size, 0, handle, 0)
        # CUmemAccessDesc: device 0 reads and writes.
        self.call("cuMemSetAccess", address, size, C.c_char_p(struct.pack("<iii", 1, 0, 3)), 1)
        return address

    def export(self, handle):
        return self.new(C.c_int, "cuMemExportToShareableHandle", handle, POSIX_FILE, 0).value

    def import_handle(self, descriptor):
        return self.new(C.c_uint64, "cuMemImportFromShareableHandle", descriptor, POSIX_FILE).value
