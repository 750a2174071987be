"""One process of a job that tests do harm to: kill, freeze, restart, exclude, drain.

    MUSTER_PROCESS_ID=I MUSTER_NUM_PROCESSES=N JAX_COORDINATOR_ADDRESS=HOST:PORT JAX_COORDINATOR_BIND_ADDRESS=127.0.0.1:0 \\
        worker.py MODE [--heartbeat-timeout S] [--backend] ...

    register   joins, stays for a while, leaves
    steps      meets all others at a barrier after each step; one that fails takes all with it
    live       recoverable: asks for the live nodes again and again, and reports every change
    rounds     recoverable: begin barrier, steps, end barrier, checkpoint; a restarted process goes on with the others
    preempt    steps until all have agreed on a step to save at, then saves and leaves

Every mode prints `EVENT registered took= jax= pid=` first and `EVENT shutdown took=` last, and exits 0. SIGINT ends it
early but in good order, as soon as the call that it waits in returns; what a mode prints between the two stands at its
function. When a call to the service fails, it prints `EVENT error code= message=`, a trace on standard error, and exits 1;
when the service or a lost connection ends the job, jaxlib aborts the process (SIGABRT), as it does any JAX process. A failing
job does both at about the same time, so either may come first.

With --die-once FILE, whichever process is the first to begin its second step (or round) makes FILE and kills itself.

Whether tasks may fail and come back is for the service to say since release 0.9.2, and was for the client to ask for before:
--recoverable does that in the releases that have it (0.7.0 to 0.8.3), and changes nothing in others.
"""

import argparse
import itertools
import os
import signal
import sys
import time
import traceback

sys.dont_write_bytecode = True
import common
from common import client, event

import jax
from jax.experimental import multihost_utils

ME = common.process_id()
EVERYONE = list(range(common.num_processes()))


def sleep_ms(duration_ms: int) -> None:
    time.sleep(duration_ms / 1000)


def die_once(args: argparse.Namespace) -> None:
    if args.die_once is None:
        return
    try:
        open(args.die_once, "x").close()
    except FileExistsError:
        return
    event("dying")
    os.kill(os.getpid(), signal.SIGKILL)


def register(args: argparse.Namespace) -> None:
    time.sleep(args.seconds)


def steps(args: argparse.Namespace) -> None:
    """Prints `EVENT step n=` after each barrier: nobody prints a step that somebody has not reached."""
    for n in itertools.count(1):
        if args.steps and n > args.steps:
            return
        sleep_ms(args.step_ms)
        if n == 2:
            die_once(args)
        if n == args.hang_at:
            event("hang", n=n)
            while True:
                time.sleep(3600)
        client().wait_at_barrier("step", args.barrier_timeout * 1000)
        event("step", n=n)


def live(args: argparse.Namespace) -> None:
    """Prints `EVENT live polls= members= [incarnations=]` for the first answer and for each that differs from the last.

    The call returns when all live members have made it, so every member must go on polling: its pace is that of the
    slowest, and a dead member holds all up until the service has given it up.
    """
    before = None
    for polls in itertools.count(1):
        # Incarnations by id; releases to 0.6.2 return the ids alone.
        now = client().get_live_nodes(EVERYONE)
        now = dict(sorted(now.items())) if isinstance(now, dict) else dict.fromkeys(sorted(now))
        if now != before:
            incarnations = {} if None in now.values() else {"incarnations": list(now.values())}
            event("live", polls=polls, members=list(now), **incarnations)
            before = now
        sleep_ms(args.poll_ms)


CHECKPOINT = "worker/checkpoint"


def last_round() -> int:
    """The last round that was saved. After the begin barrier all read the same: whoever saved one did so before coming."""
    try:
        return int(client().key_value_try_get(CHECKPOINT))
    except jax.errors.JaxRuntimeError as error:
        if common.error_code(error) != "NOT_FOUND":
            raise
        return 0


def rounds(args: argparse.Namespace) -> None:
    """The loop of a job whose processes may restart one at a time and find their way back in.

    Prints `EVENT enter barrier=ID attempt=` before each barrier, where `attempt` only ever rises in one life of a process.
    Then either `EVENT pass barrier=ID attempt= entered= left= round=`, or `EVENT fail barrier=ID attempt= code= message=`,
    after which it starts over with the begin barrier. Also `EVENT step round= n=` and `EVENT checkpoint round=`.

    A round has one number for all, because it is read after the begin barrier. So as long as no barrier has failed, among
    the `pass` lines of all processes for one barrier and round the largest `entered` comes before the smallest `left`;
    where it does not, somebody passed early, without another who was on the way.
    """
    attempts = itertools.count(1)

    def enter(barrier: str) -> dict | None:
        attempt = next(attempts)
        event("enter", barrier=barrier, attempt=attempt)
        entered = time.monotonic()
        try:
            client().wait_at_barrier(barrier, args.barrier_timeout * 1000)
        except jax.errors.JaxRuntimeError as error:
            event("fail", barrier=barrier, attempt=attempt, code=common.error_code(error), message=str(error))
            sleep_ms(100)  # a service that refuses at once must not be asked in a tight loop
            return None
        return dict(barrier=barrier, attempt=attempt, entered=entered, left=time.monotonic())

    while True:
        passed = enter(args.begin_id)
        if passed is None:
            continue
        number = last_round() + 1
        event("pass", **passed, round=number)
        if number == 2:
            die_once(args)

        for n in range(1, args.steps + 1):
            sleep_ms(args.step_ms)
            event("step", round=number, n=n)

        passed = enter(args.end_id)
        if passed is None:
            continue
        event("pass", **passed, round=number)

        sleep_ms(args.checkpoint_ms)
        client().key_value_set(CHECKPOINT, str(number), allow_overwrite=True)
        event("checkpoint", round=number)
        if number == args.rounds:
            return


def preempt(args: argparse.Namespace) -> None:
    """Prints `EVENT step n=`, and `EVENT agreed n=` and `EVENT saved n=` when all are to stop.

    SIGTERM to any of the processes gives the notice, as does whoever inserts the notice's key.
    """
    for n in itertools.count(1):
        sleep_ms(args.step_ms)
        event("step", n=n)
        if multihost_utils.reached_preemption_sync_point(n):
            event("agreed", n=n)
            sleep_ms(args.save_ms)
            event("saved", n=n)
            return


def parse_arguments() -> argparse.Namespace:
    shared = argparse.ArgumentParser(add_help=False)
    common.add_arguments(shared)
    shared.add_argument("--backend", action="store_true", help="also create the CPU backend, and so exchange the topology")
    shared.add_argument("--die-once", metavar="FILE", help="see above; for steps and rounds")
    shared.add_argument("--recoverable", action="store_true", help="ask to be recoverable, in releases where the client asks")

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(required=True, metavar="MODE")

    def mode(run) -> argparse.ArgumentParser:
        sub = modes.add_parser(run.__name__, parents=[shared])
        sub.set_defaults(run=run)
        return sub

    sub = mode(register)
    sub.add_argument("--seconds", type=float, default=1.0)

    sub = mode(steps)
    sub.add_argument("--steps", type=int, default=0, help="0: for ever (default)")
    sub.add_argument("--step-ms", type=int, default=100)
    sub.add_argument("--barrier-timeout", type=int, default=600, metavar="S")
    sub.add_argument("--hang-at", type=int, metavar="N", help="never reach the barrier of step N, but go on sending heartbeats")

    sub = mode(live)
    sub.add_argument("--poll-ms", type=int, default=100)

    sub = mode(rounds)
    sub.add_argument("--rounds", type=int, default=0, help="leave after this round; 0: never (default)")
    sub.add_argument("--steps", type=int, default=3, help="in each round")
    sub.add_argument("--step-ms", type=int, default=100)
    sub.add_argument("--checkpoint-ms", type=int, default=100)
    sub.add_argument("--begin-id", default="begin")
    sub.add_argument("--end-id", default="end")
    sub.add_argument("--barrier-timeout", type=int, default=600, metavar="S")

    sub = mode(preempt)
    sub.add_argument("--step-ms", type=int, default=100)
    sub.add_argument("--save-ms", type=int, default=100)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    # Whoever runs the tests in the background of a shell ignores it, and what they start inherits that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if args.recoverable and hasattr(jax.config, "jax_enable_recoverability"):
        jax.config.update("jax_enable_recoverability", True)
    common.initialize(args)
    try:
        if args.backend:
            event("backend", devices=[d.id for d in jax.devices()])
        args.run(args)
    except KeyboardInterrupt:
        event("interrupted")
    except jax.errors.JaxRuntimeError as error:
        event("error", code=common.error_code(error), message=str(error))
        traceback.print_exc()
        sys.stderr.flush()
        # At once: an orderly exit would wait in the shutdown barrier for whoever caused the error.
        os._exit(1)
    common.shutdown()


if __name__ == "__main__":
    main()
