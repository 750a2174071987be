#!/usr/bin/env python3
"""Kills the service under real JAX training, and compares the losses with those of an undisturbed run.

    benches/training_kills.py --muster target/release/muster [--releases 0.6.2,0.9.2,0.10.2,0.12.0] [--seconds 120]
        [--jobs hold,cancel,recoverable]

For each jaxlib (`tests/jax/setup`), three processes train with gloo (`tests/jax/train.py`), in jobs with `--error-delivery hold` and
`cancel`, and in recoverable ones. The process that serves is killed with SIGKILL every 2 to 5 seconds, at random. Then the same training runs
without a kill. Every process must end with status 0, without an error, and with the same losses at the same steps.
"""

import argparse
import os
from pathlib import Path
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

from service import core_of, start_service

ROOT = Path(__file__).resolve().parents[1]
TASKS = 3


def train(release, muster, settings, steps, kills_until):
    """Returns the losses by step, the number of kills and the time that the training took."""
    python = ROOT / "target/jax" / release / "bin/python"
    with tempfile.TemporaryDirectory(prefix="muster-kills-") as folder:
        command = [muster, "serve", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", "--log", "off", "--tasks", str(TASKS)]
        keeper, address, _ = start_service([*command, "--data-dir", folder + "/journal", *settings])
        try:
            environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "MUSTER_"))}
            environment |= {"JAX_COORDINATOR_ADDRESS": address, "JAX_COORDINATOR_BIND_ADDRESS": "127.0.0.1:0"}
            environment["MUSTER_NUM_PROCESSES"] = str(TASKS)
            program = [python, ROOT / "tests/jax/train.py", "--steps", str(steps), "--step-ms", "10"]
            began = time.monotonic()
            tasks = [
                subprocess.Popen(
                    program, env=environment | {"MUSTER_PROCESS_ID": str(task)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                    text=True,
                )
                for task in range(TASKS)
            ]
            said = [[] for _ in tasks]
            readers = [threading.Thread(target=lambda task=task, out=out: out.extend(task.stdout)) for task, out in zip(tasks, said)]
            for reader in readers:
                reader.start()
            kills = 0
            while any(task.poll() is None for task in tasks):
                time.sleep(random.uniform(2, 5) if kills_until else 0.2)
                if time.monotonic() - began < kills_until and all(task.poll() is None for task in tasks):
                    os.kill(core_of(keeper), signal.SIGKILL)
                    kills += 1
            took = time.monotonic() - began
            for reader in readers:
                reader.join()
            text = "".join(said[0])
            for number, (task, out) in enumerate(zip(tasks, said)):
                if task.returncode != 0 or "Traceback" in "".join(out):
                    raise SystemExit(f"jaxlib {release}: task {number} ended with {task.returncode}:\n" + "".join(out[-30:]))
            losses = re.findall(r"step +(\d+) +loss ([0-9.]+)", text)
            assert losses, text
            return losses, kills, took
        finally:
            keeper.terminate()
            keeper.wait(timeout=60)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--muster", required=True)
    parser.add_argument("--releases", default="0.6.2,0.9.2,0.10.2,0.12.0")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--jobs", default="hold,cancel,recoverable")
    arguments = parser.parse_args()
    for release in arguments.releases.split(","):
        for job in arguments.jobs.split(","):
            if job == "recoverable" and release not in ("0.9.2", "0.10.2"):
                continue
            settings = ["--recoverable"] if job == "recoverable" else ["--error-delivery", job]
            calm, _, alone = train(release, arguments.muster, settings, arguments.steps, 0)
            losses, kills, took = train(release, arguments.muster, settings, arguments.steps, arguments.seconds)
            same = "the same losses" if losses == calm else "OTHER LOSSES"
            print(
                f"jaxlib {release:7} {' '.join(settings):25} {kills:3} kills, {arguments.steps} steps: {same}; {took:.0f} s, "
                f"{alone:.0f} s without kills",
                flush=True,
            )
            assert losses == calm, (losses[-1], calm[-1])


if __name__ == "__main__":
    sys.exit(main())
