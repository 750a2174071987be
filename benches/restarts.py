#!/usr/bin/env python3
"""Measures how long a service is away when its process is killed.

    benches/restarts.py --muster target/release/muster [--tasks 10000] [--hosts 1250] [--kills 10]

A keeper and its service run with a journal in a temporary folder, and simulated tasks in a process of their own. The process that
serves is killed with SIGKILL again and again. Measured is the time from each kill to the first answer over HTTP, and the part of it
in which the journal is read, as the service reports it. At the end the run must be the first one, with all tasks.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

from service import core_of, serve_command, start_service


def get(url):
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.load(answer)


def connected_tasks(url, job):
    count, after = 0, ""
    while True:
        page = get(f"{url}/api/v1/jobs/{job}/tasks?limit=1000{after}")
        count += sum(task["standing"] == "connected" for task in page["tasks"])
        if page.get("next") is None:
            return count
        after = f"&after={page['next']}"


def wait_until_running(url, job, simulation):
    """Waits until the present run of a job, whose tasks the process `simulation` simulates, is running."""
    while True:
        time.sleep(1)
        assert simulation.poll() is None, "the simulation has ended"
        try:
            if get(f"{url}/api/v1/jobs/{job}")["run"]["state"] == "running":
                return
        except (OSError, TypeError):
            pass


def spread(numbers):
    numbers = sorted(numbers)
    return f"{statistics.median(numbers):.0f} ({numbers[0]:.0f}..{numbers[-1]:.0f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--muster", required=True)
    parser.add_argument("--tasks", type=int, default=10_000)
    parser.add_argument("--hosts", type=int, default=1_250)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--pause", type=float, default=8, help="seconds between two kills")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="muster-restarts-") as folder:
        keeper, _, http = start_service(serve_command(arguments.muster, "--data-dir", folder + "/journal"))
        url = f"http://{http}"
        simulation = subprocess.Popen(
            [arguments.muster, "simulate", "--server", url, "--tasks", str(arguments.tasks), "--hosts", str(arguments.hosts)],
            stdout=subprocess.DEVNULL,
        )
        try:
            job = "simulation"
            wait_until_running(url, job, simulation)
            away, replays, inputs = [], [], []
            for kill in range(arguments.kills):
                time.sleep(arguments.pause)
                began = time.monotonic()
                os.kill(core_of(keeper), signal.SIGKILL)
                while True:
                    try:
                        journal = get(f"{url}/api/v1/journal")
                        if journal["restarts"] > kill:
                            break
                    except (OSError, ValueError):
                        pass
                away.append((time.monotonic() - began) * 1e3)
                replays.append(journal["replay_seconds"] * 1e3)
                inputs.append(journal["replayed_inputs"])
            print(f"{arguments.tasks} tasks on {arguments.hosts} hosts, {arguments.kills} kills; milliseconds: median (least..most)")
            print(f"  from the kill to the first answer  {spread(away)}")
            print(f"  of that, reading the journal       {spread(replays)}, with {spread(inputs)} inputs")
            run = get(f"{url}/api/v1/jobs/{job}")["run"]
            connected = connected_tasks(url, job)
            print(f"  run {run['number']} goes on with {connected} of {arguments.tasks} tasks connected")
        finally:
            simulation.kill()
            simulation.wait()
            keeper.terminate()
            keeper.wait(timeout=60)


if __name__ == "__main__":
    sys.exit(main())
