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
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request


def get(url):
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.load(answer)


def start_service(muster, folder, further):
    command = [muster, "serve", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", "--data-dir", folder, "--log", "off"]
    keeper = subprocess.Popen(command + further, stdout=subprocess.PIPE, text=True)
    for line in keeper.stdout:
        found = re.search(r"HTTP +(http://\S+)", line)
        if found:
            threading.Thread(target=keeper.stdout.read, daemon=True).start()
            return keeper, found.group(1)
    raise SystemExit("the service has not started")


def core_of(keeper):
    with open(f"/proc/{keeper.pid}/task/{keeper.pid}/children", encoding="ascii") as file:
        children = file.read().split()
    return int(children[0]) if children else None


def connected_tasks(url, job):
    count, after = 0, ""
    while True:
        page = get(f"{url}/api/v1/jobs/{job}/tasks?limit=1000{after}")
        count += sum(task["standing"] == "connected" for task in page["tasks"])
        if page.get("next") is None:
            return count
        after = f"&after={page['next']}"


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
        keeper, url = start_service(arguments.muster, folder + "/journal", ["--tasks", "1"])
        simulation = subprocess.Popen(
            [arguments.muster, "simulate", "--server", url, "--tasks", str(arguments.tasks), "--hosts", str(arguments.hosts)],
            stdout=subprocess.DEVNULL,
        )
        try:
            job = "simulation"
            while True:
                time.sleep(1)
                try:
                    if get(f"{url}/api/v1/jobs/{job}/runs")["runs"][0]["state"] == "running":
                        break
                except OSError:
                    pass
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
