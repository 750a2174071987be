"""Finds out whether a peer's death ends a pending collective of an unmodified JAX job: process 1 is killed while process 0 waits for
it. `jax_abort.py FOLDER VARIANT`; jax_program.py has the variants. It also shows what Muster says meanwhile."""

import os
import re
import sys
import time

from jax_program import start_process
from processes import Service, kill, put_file, read_text, report, show_log, wait, wait_for_file

PENDING_S = 15  # how long a pending step may take to end


def main(folder, variant):
    os.makedirs(folder, exist_ok=True)
    service = Service(folder, "--tasks", "2", "--recoverable", "--collective-stuck-after", "5s")
    started = [start_process(variant, rank, folder, service) for rank in (0, 1)]

    def reached(name, seconds, of):
        return wait_for_file(os.path.join(folder, name), seconds, started[of][0])

    if reached("silent0", 30, 0) and reached("silent1", 5, 1):
        time.sleep(1.2)  # the pending step is on its way
        service.report_collectives(f"[{variant}] process 1 does not call")
        put_file(os.path.join(folder, "killed"))
        kill(started[1][0])
        if not reached("ended0", PENDING_S, 0):
            report(f"[{variant}] the pending step HAS NOT ENDED {PENDING_S} s after the kill")
        elif variant == "with" and reached("alone0", 8, 0):
            started.append(start_process(variant, 1, folder, service, "again"))
            reached("finished0", 14, 0)
        else:
            reached("finished0", 6, 0)
        service.report_collectives(f"[{variant}] in the end")
        service.report_findings(f"[{variant}] findings")
    else:
        report(f"[{variant}] the processes did not come to the step that process 1 does not call")
    keys = [row["key"] for row in service.get("/jobs/default/keys?recursive=true&limit=1000").get("keys", [])]
    report(f"[{variant}] cliques:", "; ".join(key for key in keys if "clique" in key)[:200])
    put_file(os.path.join(folder, "end"))
    statuses = [wait(process, 3) for process, _ in started]
    for _, log_file in started:
        show_log(log_file)
    report(f"[{variant}] statuses {statuses}")
    text = read_text(started[0][1])
    for line in dict.fromkeys(re.findall(r"\] ((?:Aborted GPU|Not aborting|Error abort).*)|(F\d{4} .*|.*Duplicate GPU.*)", text)):
        report(f"[{variant}] log:", "".join(line)[:150])
    service.end()


main(*sys.argv[1:])
