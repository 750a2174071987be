#!/usr/bin/env python3
"""Loads a service with thousands of simulated tasks and kills its process again and again, and shows whether anything grows.

    benches/soak.py --muster target/release/muster [--seconds 900] [--tasks 10000] [--hosts 1250] [--kill-every 30]

A keeper and its service run with a journal in a temporary folder. The tasks make steps with a barrier each, and every ten seconds all
tasks of two hosts die and register again. A task of another job sends heartbeats one after the other, and /metrics is read every two
seconds. The process that serves is killed with SIGKILL every --kill-every seconds.

Shortly before each kill, the memory, descriptors and threads of both processes, the CPU time of the service, the bytes of the journal and
the latencies since the last kill are taken down. The growth of each over the whole time is the median slope between all pairs of
samples, so that no single sample decides. The script fails if one grows by more than its bound, if a heartbeat fails, if a task is
lost, or if the run has ended.

A timer shows how busy the machine is: it sleeps for 20 ms, and is late by the time that it waits for a CPU. If its own 99th
percentile grows beyond the bound of the heartbeats, others needed the CPUs, and latencies do not count.
"""

import argparse
import itertools
import json
import os
from pathlib import Path
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

from durable_inserts import field, framed
from large_state import Connection, head
from restarts import connected_tasks, get, wait_until_running
from service import core_of, serve_command, start_service

STORY = """
description = "Hosts die and start again while the service does."
tasks = {tasks}
hosts = {hosts}

# The timeout is long, so that no task fails because others need the CPUs.
[job]
recoverable = true
heartbeat-timeout = "30s"

[workers]
heartbeat-interval = "5s"

[steps]
time = "5s"
spread = "1s"

[[events]]
at = "10s"
every = "10s"
what = "restart"
after = "2s"
random-hosts = 2
"""
# The growth that is permitted over the whole time: a part of the first figure, and a number. What is measured under load on a
# machine that others use moves by as much.
BOUNDS = {
    "core, resident MiB": (0.1, 16),
    "core, descriptors": (0.01, 16),
    "core, threads": (0, 1),
    "keeper, resident MiB": (0.1, 16),
    "keeper, descriptors": (0.01, 16),
    "keeper, threads": (0, 1),
    "core, CPU us a call": (0.5, 20),
    # Two snapshots and the segments since the older one come and go.
    "journal, MiB": (0.1, 128),
    "heartbeat, p50 ms": (0.5, 1),
    "heartbeat, p99 ms": (0.5, 20),
    "scrape, p50 ms": (0.5, 5),
    "scrape, p99 ms": (0.5, 50),
    "timer, p99 ms late": (0.5, 20),
}
LATENCIES = [name for name in BOUNDS if name.startswith(("heartbeat", "scrape", "timer"))]
# After a kill, the latencies are those of a start. They are shown by themselves.
START_SECONDS = 3


def process_figures(name, process):
    with open(f"/proc/{process}/status", encoding="ascii") as file:
        status = dict(line.split(":", 1) for line in file)
    return {
        f"{name}, resident MiB": int(status["VmRSS"].split()[0]) / 1024,
        f"{name}, descriptors": len(os.listdir(f"/proc/{process}/fd")),
        f"{name}, threads": int(status["Threads"]),
    }


def cpu_us_a_call(url, process):
    """The CPU time of a process that serves, for each call that it has answered; its start and all else are part of it."""
    with open(f"/proc/{process}/stat", encoding="ascii") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        calls = re.findall(r"^muster_rpc_calls_total\{.*\} (\d+)$", answer.read().decode(), re.M)
    return (int(fields[11]) + int(fields[12])) * 1e6 / os.sysconf("SC_CLK_TCK") / max(1, sum(map(int, calls)))


def percentile(numbers, part):
    numbers = sorted(numbers)
    return numbers[min(len(numbers) - 1, int(len(numbers) * part))] if numbers else 0


class Probe(threading.Thread):
    """Does something again and again, and takes down when it began and how many milliseconds it took."""

    def __init__(self, action, pause):
        super().__init__(daemon=True)
        self.action, self.pause, self.taken, self.failures, self.stopped = action, pause, [], [], threading.Event()
        self.start()

    def run(self):
        while not self.stopped.wait(self.pause):
            began = time.monotonic()
            try:
                self.action()
                self.taken.append((began, (time.monotonic() - began) * 1e3))
            except (OSError, ValueError, AssertionError, SystemExit) as error:
                self.failures.append((began, repr(error)))

    def since(self, begin):
        return [took for began, took in list(self.taken) if began >= begin]


def heartbeats(address):
    """Registers a task, and returns a function that sends one heartbeat of it."""
    connection = Connection(address)
    task = field(1, b"jax_worker")
    incarnation = b"\x19" + (17).to_bytes(8, "little")

    def call(method, message):
        connection.answer = b""
        connection.send([connection.request(head(method), framed(message))])
        connection.finish()
        assert connection.answer, f"{method.decode()} has failed"

    call(b"RegisterTask", incarnation + field(5, task))
    return lambda: call(b"Heartbeat", incarnation + field(4, task))


def growth(times, figures, seconds):
    """The median slope between all pairs of samples, over the whole time."""
    pairs = itertools.combinations(zip(times, figures), 2)
    slopes = [(later - earlier) / (until - since) for (since, earlier), (until, later) in pairs]
    return statistics.median(slopes) * seconds if slopes else 0


def folder_mib(folder):
    return sum(file.stat().st_blocks * 512 for file in Path(folder).rglob("*") if file.exists()) / 2**20


def soak(arguments, keeper, url, address, folder):
    """Returns the times of the samples, the samples, and the longest waits at the kills."""
    heartbeat = Probe(heartbeats(address), 0.02)

    def scrape():
        with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
            answer.read()

    scrapes = Probe(scrape, 2)
    timer = Probe(lambda: time.sleep(0.02), 0)
    times, samples, waits = [], [], []
    began = last_kill = time.monotonic()
    while True:
        time.sleep(max(0, last_kill + arguments.kill_every - time.monotonic()))
        calm = last_kill + START_SECONDS
        beats, reads, naps = heartbeat.since(calm), scrapes.since(calm), timer.since(calm)
        sample = process_figures("core", core_of(keeper)) | process_figures("keeper", keeper.pid)
        sample |= {"journal, MiB": folder_mib(folder), "core, CPU us a call": cpu_us_a_call(url, core_of(keeper))}
        sample |= {f"heartbeat, {name} ms": percentile(beats, part) for name, part in (("p50", 0.5), ("p99", 0.99))}
        sample |= {f"scrape, {name} ms": percentile(reads, part) for name, part in (("p50", 0.5), ("p99", 0.99))}
        sample["timer, p99 ms late"] = percentile(naps, 0.99) - 20
        if samples:
            waits.append(max(took for at, took in heartbeat.taken if last_kill - 1 <= at < calm))
        times.append(time.monotonic() - began)
        samples.append(sample)
        shown = ", ".join(f"{name} {value:.1f}" for name, value in sample.items())
        print(f"{times[-1]:4.0f} s: {shown}", file=sys.stderr, flush=True)
        if time.monotonic() - began > arguments.seconds - arguments.kill_every / 2:
            break
        last_kill = time.monotonic()
        os.kill(core_of(keeper), signal.SIGKILL)
    for probe in (heartbeat, scrapes, timer):
        probe.stopped.set()
        probe.join(timeout=60)
    assert not heartbeat.failures, f"heartbeats have failed: {heartbeat.failures[:3]}"
    print(f"{len(heartbeat.taken)} heartbeats, {len(scrapes.taken)} scrapes, {len(scrapes.failures)} of them refused during a start")
    return times, samples, waits


def print_figures(arguments, times, samples, waits):
    """Prints the figures, and returns what has grown beyond its bound."""
    print(f"{arguments.tasks} tasks, {len(waits)} kills in {times[-1]:.0f} s")
    print(f"  {'':24} {'first':>10} {'last':>10} {'growth':>10} {'bound':>10}   median (least..most)")
    grown = []
    for name, (part, number) in BOUNDS.items():
        figures = [sample[name] for sample in samples]
        some = max(1, len(figures) // 5)
        first, last = statistics.median(figures[:some]), statistics.median(figures[-some:])
        more, bound = growth(times, figures, times[-1] - times[0]), first * part + number
        spread = f"{statistics.median(figures):.1f} ({min(figures):.1f}..{max(figures):.1f})"
        print(f"  {name:24} {first:10.1f} {last:10.1f} {more:+10.1f} {bound:10.1f}   {spread}")
        if more > bound:
            grown.append(name)
    if "timer, p99 ms late" in grown:
        print("  the machine was busier in the end than in the beginning: latencies do not count")
        grown = [name for name in grown if name not in LATENCIES]
    print(f"  {'longest heartbeat at a kill, ms':47} {statistics.median(waits):.0f} ({min(waits):.0f}..{max(waits):.0f})")
    return grown


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--muster", required=True)
    parser.add_argument("--seconds", type=float, default=900)
    parser.add_argument("--tasks", type=int, default=10_000)
    parser.add_argument("--hosts", type=int, default=1_250)
    parser.add_argument("--kill-every", type=float, default=30)
    parser.add_argument("--warm-up", type=float, default=30, help="seconds before the first interval")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="muster-soak-") as folder:
        keeper, address, http = start_service(serve_command(arguments.muster, "--data-dir", folder + "/journal"))
        url = f"http://{http}"
        story = Path(folder, "story.toml")
        story.write_text(STORY.format(tasks=arguments.tasks, hosts=arguments.hosts), encoding="utf-8")
        simulation = subprocess.Popen(
            [arguments.muster, "simulate", "--server", url, "--story", story, "--json"], stdout=subprocess.PIPE, text=True
        )
        lines = []
        reader = threading.Thread(target=lambda: lines.extend(simulation.stdout), daemon=True)
        reader.start()
        try:
            wait_until_running(url, "simulation", simulation)
            time.sleep(arguments.warm_up)
            times, samples, waits = soak(arguments, keeper, url, address, folder + "/journal")
            grown = print_figures(arguments, times, samples, waits)
            # Tasks that have just died register again within seconds.
            for _ in range(20):
                connected, run = connected_tasks(url, "simulation"), get(f"{url}/api/v1/jobs/simulation")["run"]
                if connected == arguments.tasks:
                    break
                time.sleep(0.5)
            print(f"  run {run['number']} is {run['state']} with {connected} of {arguments.tasks} tasks connected")
            simulation.send_signal(signal.SIGINT)
            simulation.wait(timeout=120)
            reader.join()
            summary = json.loads(lines[-1])
            print(f"  the simulation: {summary['steps']} steps, {summary['registrations']} registrations, errors {summary['errors']}")
            for what in grown:
                print(f"{what} has grown beyond its bound")
            for what in summary["unexpected"]:
                print(f"unexpected: {what}")
            is_whole = (run["number"], run["state"], connected) == (1, "running", arguments.tasks)
            if not is_whole:
                print("the run or a task was lost")
            return 1 if grown or summary["unexpected"] or not is_whole else 0
        finally:
            simulation.kill()
            simulation.wait()
            keeper.terminate()
            keeper.wait(timeout=60)


if __name__ == "__main__":
    sys.exit(main())
