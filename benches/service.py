"""The service under measurement, for the scripts in this folder."""

import re
import subprocess
import threading


def serve_command(muster: str, *settings: str) -> "list[str]":
    """Returns the command of a service on free ports, with one job of one task."""
    return [muster, "serve", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", "--log", "off", "--tasks", "1", *settings]


def start_service(command: "list[str]", stderr: "int | None" = None) -> "tuple[subprocess.Popen[str], str, str]":
    """Starts a service, and waits until it has printed its addresses. Returns it, and its addresses for gRPC and HTTP."""
    service = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    assert service.stdout is not None
    found: "dict[str, str]" = {}
    for line in service.stdout:
        if match := re.search(r"(gRPC|HTTP)  (?:http://)?(\S+)", line):
            found[match[1]] = match[2]
        if len(found) == 2:
            threading.Thread(target=service.stdout.read, daemon=True).start()
            return service, found["gRPC"], found["HTTP"]
    raise SystemExit("the service has not started")


def core_of(keeper: "subprocess.Popen[str]") -> int:
    """Returns the process that serves: the child of a keeper."""
    with open(f"/proc/{keeper.pid}/task/{keeper.pid}/children", encoding="ascii") as file:
        return int(file.read().split()[0])
