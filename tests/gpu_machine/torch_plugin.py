"""Shows what Muster tells of an unmodified PyTorch job through the profiler plug-in: one rank with the packaged NCCL, then two ranks
on one GPU with NEW_NCCL, of which one is late for a collective; and whether the replays of a graph are counted."""

import os
import re
import sys
import time

from processes import (TWO_RANKS_ON_ONE_GPU, Service, kill, read_text, report, put_file, show_log, start, wait, wait_for_file,
                       with_new_nccl)

LATE_S = 20  # as in torch_program.py


def main(folder):
    os.makedirs(folder, exist_ok=True)
    service = Service(folder, "--tasks", "2", "--collective-stuck-after", "5s")
    program = os.path.join(os.path.dirname(__file__), "torch_program.py")
    base = {"NCCL_PROFILER_PLUGIN": os.environ["PLUGIN"], "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,PROFILE",
            "TORCH_NCCL_ENABLE_MONITORING": "0"}

    one = os.path.join(folder, "one")
    records = {"MUSTER_COLLECTIVES_DIR": os.path.join(folder, "records"), "MUSTER_COORDINATOR_ADDRESS": None}
    alone = start([sys.executable, program, "0", "1", one], os.path.join(one, "rank0.log"), base | records)
    report(f"one rank: status {wait(alone, 40)}")
    show_log(os.path.join(one, "rank0.log"))
    report_versions("one rank", os.path.join(one, "rank0.log"))
    if not os.environ.get("NEW_NCCL"):
        report("two ranks: left out, there is no new NCCL")
        return service.end()

    two = os.path.join(folder, "two")
    ranks = []
    for rank in (0, 1):
        command, variables = with_new_nccl([sys.executable, program, str(rank), "2", two])
        variables |= base | TWO_RANKS_ON_ONE_GPU
        variables |= {"MUSTER_COORDINATOR_ADDRESS": service.address, "MUSTER_PROCESS_ID": rank, "MUSTER_NUM_PROCESSES": 2}
        ranks.append(start(command, os.path.join(two, f"rank{rank}.log"), variables))

    def reached(name, seconds):
        return all([wait_for_file(os.path.join(two, f"{name}{rank}"), seconds, ranks[rank]) for rank in (0, 1)])

    if reached("rounds", 45):
        show_job(service, two, ranks, reached)
    else:
        report("two ranks do not run")
        for rank in ranks:
            kill(rank)
    put_file(os.path.join(two, "end"))
    report(f"two ranks: statuses {[wait(rank, 10) for rank in ranks]}")
    report_versions("two ranks", os.path.join(two, "rank0.log"))
    for rank in (0, 1):
        show_log(os.path.join(two, f"rank{rank}.log"))
    service.end()


def report_versions(title, log_file):
    found = re.findall(r"PROFILER/Plugin: Loaded .*|NCCL version .*", read_text(log_file))
    report(f"{title}:", ", ".join(dict.fromkeys(found)))


def show_job(service, folder, ranks, reached):
    time.sleep(2.2)  # the reports come once a second
    service.report_collectives("after 100 rounds")
    service.report_members()
    report("of one process:", " | ".join(service.cli("collectives", "--pid", str(ranks[0].pid)).splitlines())[:300])
    put_file(os.path.join(folder, "late"))
    began = time.time()
    for part in (0.25, 0.45, 0.9):
        time.sleep(max(0, began + part * LATE_S - time.time()))
        service.report_collectives(f"rank 1 is {time.time() - began:.0f} s late")
    service.report_findings("findings then")
    reached("waited", 8)
    put_file(os.path.join(folder, "graph"))
    reached("replayed", 15)
    time.sleep(2.2)
    service.report_collectives("after one more, 3, and 50 replays of a graph of 2")


main(sys.argv[1])
