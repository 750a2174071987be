"""What the test programs share: who they are, how they join, and the lines that they print for a test to read.

A line is `EVENT name t=SECONDS task=ID key=value ...`, written whole and flushed at once. `t` is CLOCK_MONOTONIC, so lines of
different processes on one machine can be ordered by it. Lists are joined by commas; a text that holds a blank or a quote,
or is empty, is written as a JSON string; everything else stands as it is.
"""

import argparse
import json
import os
import resource
import sys
import time

# A GPU or TPU that happens to be there must not change what a test does. Read by jax when it is imported, below.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# jaxlib aborts a process whose job has failed, which is what many tests are about: no core file for each.
resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))

import jax
from jax._src import distributed  # The public API has no barriers and no key-value store; others go this way too.

# Releases to 0.6.2 know an interval and a count of missed heartbeats, later ones only the product of the two.
HEARTBEAT_BY_COUNT = jax.__version_info__ < (0, 7)


def process_id() -> int:
    return int(os.environ["MUSTER_PROCESS_ID"])


def num_processes() -> int:
    return int(os.environ["MUSTER_NUM_PROCESSES"])


def event(name: str, /, **fields) -> None:
    line = " ".join(f"{key}={_text(value)}" for key, value in fields.items())
    # One write per line: processes may share the pipe that they print to.
    sys.stdout.write(f"EVENT {name} t={time.monotonic():.6f} task={process_id()} {line}".rstrip() + "\n")
    sys.stdout.flush()


def _text(value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.6f}"
    if isinstance(value, (list, tuple)):
        return ",".join(map(_text, value))
    text = str(value)
    if text == "" or any(c.isspace() or c == '"' for c in text):
        return json.dumps(text)
    return text


def error_code(error: Exception) -> str:
    """The status code of an error from the coordination service, which JAX puts first in its text: `NOT_FOUND: ...`."""
    code = str(error).partition(":")[0]
    return code if code.isupper() else "UNKNOWN"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bind", metavar="HOST:PORT", help="pass this coordinator_bind_address (default: none)")
    parser.add_argument("--init-timeout", type=int, default=60, metavar="S", help="give up registering after this (default 60)")
    parser.add_argument("--heartbeat-timeout", type=int, metavar="S", help="the client's heartbeat timeout (default: 100)")


def initialize(args: argparse.Namespace) -> None:
    """Joins the job as any JAX program does; the address comes from JAX_COORDINATOR_ADDRESS, which JAX reads itself."""
    settings = dict(num_processes=num_processes(), process_id=process_id(), initialization_timeout=args.init_timeout)
    if args.bind is not None:
        settings["coordinator_bind_address"] = args.bind
    began = time.monotonic()
    if args.heartbeat_timeout is None:
        jax.distributed.initialize(**settings)
    elif HEARTBEAT_BY_COUNT:
        # Not reachable through the public call of these releases, only through the one beneath it.
        distributed.global_state.initialize(
            client_heartbeat_interval_seconds=1, client_max_missing_heartbeats=args.heartbeat_timeout, **settings
        )
    else:
        jax.distributed.initialize(heartbeat_timeout_seconds=args.heartbeat_timeout, **settings)
    event("registered", took=time.monotonic() - began, jax=jax.__version__, pid=os.getpid())


def client():
    return distributed.global_state.client


def shutdown() -> None:
    began = time.monotonic()
    jax.distributed.shutdown()
    event("shutdown", took=time.monotonic() - began)
