#!/usr/bin/env python3
"""Kills processes of an elastic() run again and again, and compares the run with an undisturbed one.

    target/python/tools/bin/python tests/python/elastic_runs.py [--release RELEASE ...] [--seconds 120] [--seed N]

Four processes train; every few seconds any of them is killed (kill -9) and started again. The losses of all steps are those of an
undisturbed run, and the final weights are equal in all processes. It prints the times from a kill to the next step that the others
commit, and from the start of a process to its first step, in which most of the time is the import of JAX. A survivor that Muster has
to end, because gloo has lost an operation, is started again as well, and counted.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import time

from conftest import RELEASES, Scene, interpreter
from test_elastic import TRAIN, assert_close, final_weights, losses, reference, step_lines

COUNT = 4
STUCK = "this process is stuck in a collective"
STEP_S = 0.05


def where_they_are(server, programs) -> str:
    """Ends all programs, and returns the states of their tasks, and the stacks and last lines of each."""
    told = [f"{task.task}: {task.state}" for task in server.client.job().run.tasks]
    for number, program in enumerate(programs):
        if program.process.poll() is None:
            # Python then writes the stacks of its threads.
            program.process.send_signal(signal.SIGABRT)
        program.process.wait()
        told += [f"--- process {number} ended with {program.process.returncode}", *program.rest().splitlines()[-40:]]
    return "\n".join(told)


def run(scene: Scene, release: str, seconds: float, seed: int, show=print) -> None:
    rng = random.Random(seed)
    server = scene.serve("--tasks", str(COUNT), "--recoverable")
    # More than are done in the time; the last ones undisturbed.
    steps = int(seconds / STEP_S)
    expected, weights = reference(scene, release, steps)

    def start(process: int, *more: str):
        arguments = (server.grpc, str(COUNT), str(process), str(steps), str(STEP_S), *more)
        return scene.python(release, TRAIN, *arguments, PYTHONFAULTHANDLER="1")

    programs = [start(process) for process in range(COUNT)]
    try:
        kills, starts, ended, stuck = disturb(programs, start, seconds, rng)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{where_they_are(server, programs)}") from None
    check_losses(programs, ended, expected, weights)
    recovered = []
    for at, victim in kills:
        others = [line["at"] for program in [*programs, *ended] for line in step_lines(program) if line["process"] != victim]
        recovered.append(min(time for time in others if time > at + STEP_S) - at)
    show(
        f"{release}: {len(kills)} kills in {seconds:g} s, {stuck} survivors stuck and ended; all {steps} losses as undisturbed; "
        f"from a kill to the next step p50 {statistics.median(recovered):.2f} s, worst {max(recovered):.2f} s; "
        f"from a start to the first step p50 {statistics.median(starts):.2f} s, worst {max(starts):.2f} s"
    )


def disturb(programs, start, seconds: float, rng: random.Random):
    """Kills and starts processes, and waits for the end of all. Returns the kills, the times that returns took, the programs that
    were killed, and how many survivors were stuck."""
    for program in programs:
        program.line("STEP")
    ended, kills, starts, stuck = [], [], [], 0

    def start_again(process: int) -> None:
        ended.append(programs[process])
        began = time.monotonic()
        programs[process] = start(process, "struct")
        programs[process].line("STEP")
        starts.append(step_lines(programs[process])[0]["at"] - began)

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(rng.uniform(1.0, 4.0))
        victim = rng.randrange(COUNT)
        if any(program.process.poll() is not None for program in programs):
            break
        programs[victim].kill()
        kills.append((time.monotonic(), victim))
        time.sleep(rng.uniform(0.0, 1.0))
        start_again(victim)
        for process, program in enumerate(programs):
            if program.process.poll() is not None and STUCK in program.rest():
                stuck += 1
                start_again(process)
    for program in programs:
        # The undisturbed steps at the end may take longer than the deadline of one wait.
        while program.next("STEP|FINAL")[0] != "FINAL":
            pass
        program.succeed()
    for program in ended:
        # All lines of the killed processes: steps that they committed count as well.
        program.rest()
    return kills, starts, ended, stuck


def check_losses(programs, ended, expected, weights) -> None:
    for program in programs:
        assert_close(final_weights(program), weights)
        assert final_weights(program) == final_weights(programs[0]), "the weights are equal, bit by bit"
    for program in [*programs, *ended]:
        own = losses(program)
        assert_close([own[number] for number in sorted(own)], [expected[number] for number in sorted(own)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--release", action="append", choices=RELEASES, help="a release of JAX; all by default")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    for release in options.release or [release for release in RELEASES if interpreter(release).exists()]:
        scene = Scene()
        try:
            run(scene, release, options.seconds, options.seed)
        finally:
            scene.close()


if __name__ == "__main__":
    main()
