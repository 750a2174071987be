"""torch.distributed's gloo over the loopback interface: isend and irecv, several under way."""

import datetime
import os
import socket
import sys
import time

os.environ["GLOO_SOCKET_IFNAME"] = "lo"

import common  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

torch.set_num_threads(1)


class Gloo:
    name = "gloo"
    transport = "tcp"
    one_sided = False
    settings = f"torch {torch.__version__}, gloo, GLOO_SOCKET_IFNAME=lo, one isend for each buffer"

    def __init__(self, sender):
        self.sender = sender
        self.ack = torch.zeros(1, dtype=torch.int64)

    def meet(self, pipe):
        if self.sender:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            pipe.send(("port", port))
        else:
            port = common.expect(pipe, "port")
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=0 if self.sender else 1,
            world_size=2,
            timeout=datetime.timedelta(seconds=60),
        )

    def arrange(self, shape, pipe):
        self.shape = shape
        self.memory, self.whole = common.buffers(shape)
        self.tensors = [torch.from_numpy(m) for m in self.memory]

    def post(self, slot):
        move = (lambda t: dist.isend(t, 1)) if self.sender else (lambda t: dist.irecv(t, 0))
        return [move(t) for t in self.tensors[slot * self.shape.batch : (slot + 1) * self.shape.batch]]

    def launches(self, count, pipe):
        slots = self.shape.in_flight
        under_way = []
        for n in range(count):
            if len(under_way) == slots:
                for work in under_way.pop(0):
                    work.wait()
            under_way.append(self.post(n % slots))
        for works in under_way:
            for work in works:
                work.wait()

    def once(self, pipe):
        """There, and the time of its arrival back: only so does a sender know."""
        for work in self.post(0):
            work.wait()
        if self.sender:
            dist.recv(self.ack, 1)
            return int(self.ack[0])
        self.ack[0] = time.monotonic_ns()
        dist.send(self.ack, 0)


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(__file__))
    common.main(Gloo)
