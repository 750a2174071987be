"""An ordinary PyTorch program, in which nothing knows Muster: `torch_program.py RANK RANKS FOLDER`. It runs 100 rounds of four
collectives, one all-reduce for which rank 1 is 20 s late, and a graph with two collectives; files in FOLDER say how far it is."""

import os
import sys
import time

import torch
import torch.distributed as dist

from processes import limit_life, list_loaded, log, put_file, report, wait_for_file

LATE_S = 20

limit_life(85)
rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
on_gpu = torch.cuda.is_available()
device = torch.device("cuda:0" if on_gpu else "cpu")


def file(name):
    return os.path.join(folder, name)


def synchronize():
    if on_gpu:
        torch.cuda.synchronize()


store = dist.FileStore(file("store"), ranks)
dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=ranks)
summed = torch.full((1024,), rank + 1.0, device=device)
dist.all_reduce(summed)
synchronize()
right = bool((summed == ranks * (ranks + 1) / 2).all())
report(f"rank {rank} of {ranks}: PyTorch {torch.__version__}, sum {'right' if right else 'WRONG'}, {list_loaded('libnccl.so')}, "
       f"{list_loaded('muster_nccl_profiler')}")
small, all_parts, part = torch.ones(4096, device=device), torch.zeros(4096 * ranks, device=device), torch.zeros(4096, device=device)
began = time.time()
for _ in range(100):
    dist.all_reduce(small)
    dist.all_gather_into_tensor(all_parts, small)
    if on_gpu:
        dist.reduce_scatter_tensor(part, all_parts)
    dist.broadcast(small, 0)
    small.fill_(1.0)
synchronize()
log(f"100 rounds of four collectives: {time.time() - began:.2f} s")
put_file(file(f"rounds{rank}"))
if ranks > 1:
    wait_for_file(file("late"), 30)
    if rank == 1:
        time.sleep(LATE_S)
    dist.all_reduce(small)
    synchronize()
    put_file(file(f"waited{rank}"))
    wait_for_file(file("graph"), 20)
if on_gpu:
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            dist.all_reduce(small)
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        dist.all_reduce(small)
        dist.all_gather_into_tensor(all_parts, small)
    for _ in range(50):
        graph.replay()
    synchronize()
put_file(file(f"replayed{rank}"))
if ranks > 1:
    wait_for_file(file("end"), 15)
log("done")
sys.stdout.flush()
os._exit(0)
