"""Shows what Muster knows of an unmodified JAX job of two processes on one GPU: the keys of its service, the clique, the
collectives that the profiler plug-in reports, and beside it what NCCL's own RAS service answers."""

import os
import re
import socket
import sys
import time

from jax_program import start_process
from processes import Service, put_file, report, show_log, wait, wait_for_file


def ask_ras():
    try:
        with socket.create_connection(("127.0.0.1", 28028), 3) as connection:
            connection.settimeout(6)
            connection.sendall(b"client protocol 2\nset format json\nverbose status\n")
            text = b""
            while more := connection.recv(65536):
                text += more
            return text.decode(errors="replace")
    except OSError as error:
        return repr(error)


def main(folder):
    os.makedirs(folder, exist_ok=True)
    service = Service(folder, "--tasks", "2", "--collective-stuck-after", "5s")
    processes = [start_process("steps", rank, folder, service) for rank in (0, 1)]
    if all([wait_for_file(os.path.join(folder, f"steps{rank}"), 60, process) for rank, (process, _) in enumerate(processes)]):
        time.sleep(2.2)  # the reports come once a second
        keys = [row["key"] for row in service.get("/jobs/default/keys?recursive=true&limit=1000").get("keys", [])]
        report(f"{len(keys)} keys:", "; ".join(keys)[:400])
        service.report_collectives("after 51 steps")
        service.report_members()
        text = ask_ras()
        print("### RAS\n" + text)
        report("RAS:", re.sub(r"\s+", " ", text)[:300])
    else:
        report("the processes did not run 50 steps")
    put_file(os.path.join(folder, "end"))
    statuses = [wait(process, 10) for process, _ in processes]
    for _, log_file in processes:
        show_log(log_file)
    report(f"statuses {statuses}")
    service.report_findings("findings")
    service.end()


main(sys.argv[1])
