"""Runs the coordination service that jaxlib itself contains, alone in a process.

The reference that Muster is compared with: in differential tests, and in benchmarks. In a JAX job this service lives inside
process 0; here it serves any clients, with the settings that JAX does not expose.

    cxx_service.py --tasks 2 [--port 8476]

Prints `READY port=PORT` once clients can connect. Ends on SIGTERM or SIGINT, and when its standard input closes (where that
is a pipe or a socket), so that it does not outlive a test that was killed.
"""

import argparse
import os
import signal
import socket
import stat
import sys
import threading

# Warnings and errors only, as jax sets it too. Read by jaxlib when it is imported.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")

from jaxlib import _jax

HOST = "127.0.0.1"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tasks", type=int, required=True, help="number of tasks in the job")
    parser.add_argument("--port", type=int, default=0, help="on the loopback interface (default: any free one)")
    parser.add_argument("--heartbeat-timeout", type=int, default=100, metavar="S")
    parser.add_argument("--shutdown-timeout", type=int, default=300, metavar="S", help="how long the shutdown barrier waits")
    parser.add_argument("--register-timeout", type=int, default=3600, metavar="S", help="how long the first wait for the last")
    parser.add_argument("--recoverable", action="store_true", help="tasks may fail and come back (jaxlib 0.9.2 and later)")
    return parser.parse_args()


def reserve(port: int) -> socket.socket:
    """Binds the port, or any free one for 0, without listening.

    gRPC sets SO_REUSEPORT, so the service can bind what is held here, and nobody can take a port that the system chose
    before the service has it. For the same reason two services would share a port and its clients in silence: a port that
    was asked for must first be free to a socket without that option.
    """
    if port != 0:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError as error:
                sys.exit(f"cxx_service: port {port} is not free: {error.strerror}")
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind((HOST, port))
    return held


def start(args: argparse.Namespace, port: int):
    # The binding's documentation is its signature, and the only place where it can be read.
    signature = _jax.get_distributed_runtime_service.__doc__
    settings = dict(cluster_register_timeout=args.register_timeout, shutdown_timeout=args.shutdown_timeout)
    if "heartbeat_timeout" in signature:
        settings["heartbeat_timeout"] = args.heartbeat_timeout
    else:
        settings.update(heartbeat_interval=1, max_missing_heartbeats=args.heartbeat_timeout)
    if "recoverable" in signature:
        settings["recoverable"] = args.recoverable
    elif args.recoverable:
        sys.exit("cxx_service: this jaxlib has no recoverable service")
    return _jax.get_distributed_runtime_service(f"{HOST}:{port}", args.tasks, **settings)


def main() -> None:
    args = parse_arguments()
    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: over.set())

    with reserve(args.port) as held:
        port = held.getsockname()[1]
        service = start(args, port)
    print(f"READY port={port}", flush=True)

    # /dev/null is always at its end, and a terminal is for a person: neither says that whoever started this has gone.
    kind = os.fstat(0).st_mode
    if stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind):
        threading.Thread(target=lambda: (sys.stdin.buffer.read(), over.set()), daemon=True).start()
    over.wait()
    service.shutdown()


if __name__ == "__main__":
    main()
