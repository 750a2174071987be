"""NCCL through ctypes: non-blocking communicators, groups, and the state of a communicator."""

import ctypes as C
import time

from processes import log

FLOAT, BYTE, SUM = 7, 0, 0
IN_PROGRESS = 7
UNDEFINED = -(1 << 31)


class UniqueId(C.Structure):
    _fields_ = [("bytes", C.c_ubyte * 128)]


class Config(C.Structure):
    """ncclConfig_t of NCCL 2.30.7 and newer. An older NCCL reads the part that its version has."""

    NUMBERS = ["blocking", "cgaClusterSize", "minCTAs", "maxCTAs"]
    MORE = ["collnetEnable", "CTAPolicy", "shrinkShare", "nvlsCTAs", "nChannelsPerNetPeer", "nvlinkCentricSched", "graphUsageMode",
            "numRmaCtx", "maxP2pPeers", "graphStreamOrdering"]
    _fields_ = [("size", C.c_size_t), ("magic", C.c_uint), ("version", C.c_uint), *((name, C.c_int) for name in NUMBERS),
                ("netName", C.c_void_p), ("splitShare", C.c_int), ("trafficClass", C.c_int), ("commName", C.c_void_p),
                *((name, C.c_int) for name in MORE)]


class Nccl:
    def __init__(self, path):
        self.library = C.CDLL(path)
        self.library.ncclGetErrorString.restype = self.library.ncclGetLastError.restype = C.c_char_p
        version = C.c_int()
        self.call("ncclGetVersion", C.byref(version))
        self.version = version.value

    def call(self, name, *arguments):
        """Calls NCCL and returns its code. Integers are passed as in cuda_driver.py."""
        return getattr(self.library, name)(*(C.c_size_t(a) if isinstance(a, int) else a for a in arguments))

    def describe(self, code, communicator=None):
        last = (self.library.ncclGetLastError(communicator) or b"").decode()
        return f"{code} ({self.library.ncclGetErrorString(code).decode()}; last: {last[:200]})"

    def unique_id(self):
        made = UniqueId()
        if code := self.call("ncclGetUniqueId", C.byref(made)):
            raise RuntimeError("ncclGetUniqueId: " + self.describe(code))
        return made

    def state(self, communicator):
        state = C.c_int(-1)
        code = self.call("ncclCommGetAsyncError", communicator, C.byref(state))
        return -code if code else state.value

    def settle(self, communicator, seconds):
        """Waits until nothing is in progress; returns the state and the seconds."""
        began = time.time()
        while (state := self.state(communicator)) == IN_PROGRESS and time.time() - began < seconds:
            time.sleep(0.0005)
        return state, time.time() - began

    def create(self, ranks, unique_id, rank):
        """Creates a non-blocking communicator."""
        config = Config(size=C.sizeof(Config), magic=0xCAFEBEEF, version=min(23007, self.version))
        for name in (*Config.NUMBERS, "splitShare", "trafficClass", *Config.MORE):
            setattr(config, name, UNDEFINED)
        config.blocking = 0
        communicator, began = C.c_void_p(), time.time()
        code = self.call("ncclCommInitRankConfig", C.byref(communicator), ranks, unique_id, rank, C.byref(config))
        called = time.time() - began
        state, settled = self.settle(communicator, 30) if code in (0, IN_PROGRESS) else (code, 0.0)
        log(f"ncclCommInitRankConfig: {code} in {called * 1e3:.1f} ms; state {state} after {settled * 1e3:.1f} ms more")
        if state:
            raise RuntimeError("ncclCommInitRankConfig: " + self.describe(state, communicator))
        return communicator

    def group(self, communicator, *calls):
        """Makes calls in a group and waits until they are in the stream; returns a code."""
        self.call("ncclGroupStart")
        for call in calls:
            if (code := call()) not in (0, IN_PROGRESS):
                log("a call in a group:", self.describe(code))
        code = self.call("ncclGroupEnd")
        return self.settle(communicator, 20)[0] if code == IN_PROGRESS else code

    def all_reduce(self, communicator, source, target, count, stream):
        return self.group(communicator, lambda: self.call("ncclAllReduce", source, target, count, FLOAT, SUM, communicator, stream))

    def swap(self, communicator, source, target, size, peer, stream):
        """Sends and receives in one group."""
        return self.group(
            communicator,
            lambda: self.call("ncclSend", source, size, BYTE, peer, communicator, stream),
            lambda: self.call("ncclRecv", target, size, BYTE, peer, communicator, stream),
        )
