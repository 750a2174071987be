"""NCCL's profiler plug-in in the wheel: `muster launch --collectives` lets a program load it, and the server hears of its collectives.

NCCL and the driver are simulated (tests/simulated_gpu), because this machine may have no GPU.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
import subprocess
import sys

import pytest

from conftest import PATIENCE_S, ROOT, TOOLS, clean_environment

import muster

TASKS = 2
CALLS = 5

# A program that calls NCCL and knows nothing of Muster. Its ranks meet through a file.
PROGRAM = """
import ctypes, json, os, pathlib, sys, time, urllib.request

library, meeting, calls = ctypes.CDLL(sys.argv[1]), pathlib.Path(sys.argv[2]), int(sys.argv[3])
rank, ranks = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])

class UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 128)]

def check(code):
    assert code == 0, code

context, stream, buffer, communicator, identity = (
    ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_void_p(), UniqueId()
)
check(library.cuInit(0))
check(library.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
check(library.cuCtxSetCurrent(context))
check(library.cuStreamCreate(ctypes.byref(stream), 1))
check(library.cuMemAlloc_v2(ctypes.byref(buffer), ctypes.c_size_t(4096)))
if rank == 0:
    check(library.ncclGetUniqueId(ctypes.byref(identity)))
    meeting.with_suffix(".new").write_bytes(bytes(identity))
    meeting.with_suffix(".new").rename(meeting)
while not meeting.exists():
    time.sleep(0.01)
identity = UniqueId.from_buffer_copy(meeting.read_bytes())
check(library.ncclCommInitRank(ctypes.byref(communicator), ranks, identity, rank))
for _ in range(calls):
    check(library.ncclAllReduce(buffer, buffer, ctypes.c_size_t(1024), 7, 0, communicator, stream))
check(library.cuStreamSynchronize(stream))
if rank == 0:
    url, cliques = os.environ["MUSTER_SERVER"] + "/api/v1/jobs/" + os.environ["MUSTER_JOB"] + "/collectives", []
    for _ in range(600):
        with urllib.request.urlopen(url) as answer:
            cliques = json.load(answer)["cliques"]
        if cliques and all(clique["reported"] == ranks and clique["back"] == calls for clique in cliques):
            break
        time.sleep(0.1)
    print("the server knows", [(clique["ranks"], clique["back"]) for clique in cliques])
    meeting.with_suffix(".done").touch()
while not meeting.with_suffix(".done").exists():
    time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def simulated_nccl() -> Path:
    build = ["cargo", "build", "--locked", "--quiet", "-p", "muster-simulated-gpu"]
    subprocess.run(build, cwd=ROOT, check=True, timeout=600)
    return ROOT / "target/debug/libsimulated_gpu.so"


def test_the_package_is_the_plug_in_that_nccl_looks_for():
    library = ctypes.CDLL(muster.nccl_plugin())
    for version in range(1, 8):
        assert getattr(library, f"ncclProfiler_v{version}")


def test_the_command_prints_the_same_file():
    command = [TOOLS / "bin/muster", "collectives", "--plugin"]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout.strip()) == (0, muster.nccl_plugin()), done


def launch(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [TOOLS / "bin/muster", "launch", "-n", str(TASKS), *arguments]
    env = clean_environment(**variables)
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_S)


def test_a_launch_lets_the_processes_load_the_plug_in(simulated_nccl, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    words = [sys.executable, program, simulated_nccl, tmp_path / "meeting", str(CALLS)]
    done = launch(
        "--collectives",
        "--",
        *map(str, words),
        MUSTER_COLLECTIVES_DIR=str(tmp_path),
    )
    assert done.returncode == 0, done
    assert f"the server knows [({TASKS}, {CALLS})]" in done.stdout, done


def test_a_launch_refuses_a_second_plug_in():
    done = launch("--collectives", "--", "true", NCCL_PROFILER_PLUGIN="other.so")
    assert done.returncode == 125, done
    assert "NCCL_PROFILER_PLUGIN names other.so already" in done.stderr, done
    for same in ("", muster.nccl_plugin()):
        assert launch("--collectives", "--", "true", NCCL_PROFILER_PLUGIN=same).returncode == 0
