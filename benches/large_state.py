#!/usr/bin/env python3
"""Measures restarts with a large state: many keys, many connections, and a long journal.

    benches/large_state.py --muster target/release/muster [--against OLD] [--keys 1000000] [--connections 100]
        [--order scattered|ascending] [--repeat 5] [--folder DIR]

The keys, with values of 64 bytes, are inserted once: in ascending order, or each in another one of 256 directories than the key
before, as by 256 tasks that insert keys of their own. Then these are measured, with two programs in alternation if there is --against:

- *kill to all served*: a keeper and its service run with the keys, and connections are open. The process that serves is killed with
  SIGKILL, and a read is sent on every connection at once. The journal is a snapshot, as most of the time.
- *replay*: a service starts from a journal that has every insert and no snapshot.
- *memory*: of a service that has just inserted the keys, with a journal and without one.

Every read must have the value that was inserted.
"""

import argparse
import json
import os
from pathlib import Path
import select
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request

from durable_inserts import field, framed
from service import core_of, serve_command, start_service

VALUE = b"v" * 56
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 4, 6, 7, 8
ACK = END_STREAM = 1
END_HEADERS = 4
# The service permits more calls at a time on one connection.
CALLS_AT_ONCE = 100


def scattered_key(number):
    return b"bench/%02x/%08d" % (number & 0xFF, number)


def ascending_key(number):
    return b"bench/%08d" % number


def insert(key, number):
    return framed(field(1, field(1, key(number)) + field(2, b"%08d" % number + VALUE)) + b"\x10\x01")


def literal(name, value):
    """A field of HPACK that enters no table."""
    return name + bytes([len(value)]) + value


def head(method):
    path = b"/tensorflow.CoordinationService/" + method
    fields = b"\x83\x86" + literal(b"\x04", path) + literal(b"\x01", b"muster") + literal(b"\x0f\x10", b"application/grpc")
    return fields + literal(b"\x00\x02te", b"trailers")


INSERT, READ = head(b"InsertKeyValue"), head(b"TryGetKeyValue")


def frame(kind, flags, stream, payload):
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


class Connection:
    """A connection over which calls go without a library: a million of them are to be made in seconds."""

    def __init__(self, address):
        host, port = address.rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.sendall(PREFACE + frame(SETTINGS, 0, 0, b"") + frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 0x7FFF0000)))
        self.stream, self.buffer, self.ended, self.answer = 1, b"", 0, b""
        # The first head after the settings of the service, which want no table, has to say that there is none.
        self.table_size, self.has_settings = b"\x20", False
        while not self.has_settings:
            self.receive()

    def request(self, head, message):
        stream, head = self.stream, self.table_size + head
        self.stream, self.table_size = stream + 2, b""
        return frame(HEADERS, END_HEADERS, stream, head) + frame(DATA, END_STREAM, stream, message)

    def receive(self):
        """Reads what has arrived. Counts the calls that have ended, and keeps the last message."""
        received = self.socket.recv(1 << 16)
        if not received:
            raise SystemExit("a connection has ended")
        buffer = self.buffer + received
        at, length = 0, len(buffer)
        while at + 9 <= length:
            size = buffer[at] << 16 | buffer[at + 1] << 8 | buffer[at + 2]
            if at + 9 + size > length:
                break
            kind, flags = buffer[at + 3], buffer[at + 4]
            if kind == DATA:
                self.answer = buffer[at + 9 : at + 9 + size]
            elif kind == HEADERS:
                self.ended += flags & END_STREAM
            elif kind == SETTINGS and not flags & ACK:
                self.socket.sendall(frame(SETTINGS, ACK, 0, b""))
                self.has_settings = True
            elif kind == PING and not flags & ACK:
                self.socket.sendall(frame(PING, ACK, 0, buffer[at + 9 : at + 9 + size]))
            elif kind == GOAWAY:
                raise SystemExit(f"the service ends a connection: {buffer[at + 9 : at + 9 + size]}")
            at += 9 + size
        self.buffer = buffer[at:]

    def send(self, requests):
        self.expected = self.ended + len(requests)
        self.socket.sendall(b"".join(requests))

    def finish(self):
        while self.ended < self.expected:
            self.receive()


class Service:
    """A service with the journal in `folder`; None: without one. `folder` is locked until it is stopped."""

    def __init__(self, muster, folder, *settings):
        command = serve_command(muster, *settings)
        began = time.monotonic()
        self.process, self.grpc, self.http = start_service(command + (["--data-dir", folder] if folder else ["--ephemeral"]))
        self.start_ms = (time.monotonic() - began) * 1e3
        self.has_keeper = folder is not None and "--no-keeper" not in settings

    def core(self):
        return core_of(self.process) if self.has_keeper else self.process.pid

    def journal(self):
        with urllib.request.urlopen(f"http://{self.http}/api/v1/journal", timeout=60) as answer:
            return json.load(answer)

    def wait_for_snapshot(self):
        while self.journal()["snapshots"] == 0:
            time.sleep(0.1)

    def stop(self, by=signal.SIGTERM):
        self.process.send_signal(by)
        self.process.wait(timeout=60)


def memory(process):
    """Returns the resident MiB of a process: all, those that no file backs, and the most so far."""
    found = {}
    for name in ("smaps_rollup", "status"):
        with open(f"/proc/{process}/{name}", encoding="ascii") as file:
            found |= {line.split()[0].rstrip(":"): int(line.split()[1]) / 1024 for line in file if line.endswith("kB\n")}
    return found["Rss"], found["Anonymous"], found["VmHWM"]


def insert_keys(service, key, keys, keep_segments):
    """Inserts the keys. Calls `keep_segments` often enough to see each segment before it is deleted."""
    connections = [Connection(service.grpc) for _ in range(4)]
    began = time.monotonic()
    for first in range(0, keys, CALLS_AT_ONCE * len(connections)):
        for turn, connection in enumerate(connections):
            from_key = first + turn * CALLS_AT_ONCE
            numbers = range(from_key, min(keys, from_key + CALLS_AT_ONCE))
            connection.send([connection.request(INSERT, insert(key, number)) for number in numbers])
        for connection in connections:
            connection.finish()
        if first // (CALLS_AT_ONCE * len(connections)) % 20 == 0:
            keep_segments()
    keep_segments()
    return time.monotonic() - began


def check_answer(connection, number):
    expected = b"%08d" % number + VALUE
    assert expected in connection.answer, f"the key {number} has another value: {connection.answer}"


def read_from_all(connections, key, keys, kill):
    """Kills, and sends a read on each connection. Returns the milliseconds from the kill to the first and to the last answer."""
    by_descriptor = {connection.socket.fileno(): (connection, number * 7919 % keys) for number, connection in enumerate(connections)}
    requests = [
        (connection, connection.request(READ, framed(field(1, key(number))))) for connection, number in by_descriptor.values()
    ]
    with select.epoll() as poll:
        for descriptor in by_descriptor:
            poll.register(descriptor, select.EPOLLIN)
        began = time.monotonic()
        kill()
        for connection, request in requests:
            connection.send([request])
        first = last = None
        while by_descriptor:
            for descriptor, _ in poll.poll(60):
                connection, number = by_descriptor[descriptor]
                connection.receive()
                if connection.ended == connection.expected:
                    last = time.monotonic()
                    first = first or last
                    check_answer(connection, number)
                    poll.unregister(descriptor)
                    del by_descriptor[descriptor]
    return (first - began) * 1e3, (last - began) * 1e3


def measure_kill(muster, folder, arguments):
    service = Service(muster, folder)
    try:
        connections = [Connection(service.grpc) for _ in range(arguments.connections)]
        for number, connection in enumerate(connections):
            connection.send([connection.request(READ, framed(field(1, arguments.key(number % arguments.keys))))])
            connection.finish()
            check_answer(connection, number % arguments.keys)
        service.wait_for_snapshot()
        time.sleep(1)
        before = memory(service.core())
        # The part of the client, which is a script.
        _, undisturbed = read_from_all(connections, arguments.key, arguments.keys, lambda: None)
        first, last = read_from_all(connections, arguments.key, arguments.keys, lambda: os.kill(service.core(), signal.SIGKILL))
        journal = service.journal()
        assert journal["continued_connections"] == len(connections), journal
        time.sleep(1)
        after = memory(service.core())
        for connection in connections:
            connection.socket.close()
        return {
            "kill to the first answer, ms": first,
            "kill to all answers, ms": last,
            "of that, reading the journal, ms": journal["replay_seconds"] * 1e3,
            "inputs applied again": journal["replayed_inputs"],
            "the same reads without a kill, ms": undisturbed,
            "resident before the kill, MiB": before[0],
            "resident after it, MiB": after[0],
        }
    finally:
        service.stop()


def measure_replay(muster, log, folder):
    shutil.copytree(log, folder, copy_function=os.link)
    service = Service(muster, folder, "--no-keeper")
    try:
        journal = service.journal()
        return {
            "replay of all changes, ms": journal["replay_seconds"] * 1e3,
            "program start to serving, ms": service.start_ms,
            "changes applied": journal["replayed_inputs"],
        }
    finally:
        service.stop(signal.SIGKILL)
        shutil.rmtree(folder)


def measure_insertion(muster, folder, log, key, keys):
    """Inserts the keys and stops the service in good order. Hard links in `log` keep each segment that the service deletes."""

    def keep_segments():
        for segment in Path(folder).glob("segment-*") if folder else []:
            if not (log / segment.name).exists():
                os.link(segment, log / segment.name)

    service = Service(muster, folder)
    try:
        took = insert_keys(service, key, keys, keep_segments)
        if folder:
            shutil.copy(Path(folder) / "identity", log)
        time.sleep(2)
        resident, anonymous, most = memory(service.core())
        return took, resident, anonymous, most
    finally:
        # What a stop adds to the last segment is no change of the state.
        service.stop()


def spread(numbers):
    numbers = sorted(numbers)
    return f"{statistics.median(numbers):9.0f} ({numbers[0]:.0f}..{numbers[-1]:.0f})"


def print_runs(title, runs):
    print(title)
    for name, figures in runs.items():
        print(f"  {name}")
        for what in figures[0]:
            print(f"    {what:34} {spread([run[what] for run in figures])}", flush=True)
    if len(runs) == 2:
        new, old = runs.values()
        for what in new[0]:
            if what.endswith(" ms"):
                ratios = sorted(ours[what] / theirs[what] for ours, theirs in zip(new, old))
                print(f"  new / old, {what:33} {statistics.median(ratios):5.2f} ({ratios[0]:.2f}..{ratios[-1]:.2f})", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--muster", required=True)
    parser.add_argument("--against", help="another program, measured in alternation")
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--connections", type=int, default=100)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--folder", default=None, help="a folder for the journals, of which it needs about a GiB")
    parser.add_argument("--no-memory", action="store_true", help="do not compare the memory with that of a service without a journal")
    parser.add_argument("--order", choices=["scattered", "ascending"], default="scattered")
    arguments = parser.parse_args()
    arguments.key = scattered_key if arguments.order == "scattered" else ascending_key
    programs = [program for program in (arguments.muster, arguments.against) if program]
    with tempfile.TemporaryDirectory(prefix="muster-large-", dir=arguments.folder) as folder:
        journal, log, copy = f"{folder}/journal", Path(folder, "log"), f"{folder}/copy"
        log.mkdir()
        loads = {"with a journal": measure_insertion(arguments.muster, journal, log, arguments.key, arguments.keys)}
        if not arguments.no_memory:
            loads["without one"] = measure_insertion(arguments.muster, None, log, arguments.key, arguments.keys)
        for name, (took, resident, anonymous, most) in loads.items():
            print(
                f"{arguments.keys} keys inserted {name}: {took:.0f} s, {resident:.0f} MiB resident ({anonymous:.0f} MiB without files), "
                f"{most:.0f} MiB at most",
                flush=True,
            )
        snapshot = max(Path(journal).glob("snapshot-*")).stat().st_size / 2**20
        segments = sum(file.stat().st_size for file in log.glob("segment-*")) / 2**20
        print(f"snapshot {snapshot:.0f} MiB, log {segments:.0f} MiB", flush=True)
        kills = {program: [] for program in programs}
        replays = {program: [] for program in programs}
        for turn in range(arguments.repeat):
            for program in programs if turn % 2 == 0 else reversed(programs):
                kills[program].append(measure_kill(program, journal, arguments))
                replays[program].append(measure_replay(program, log, copy))
        print_runs(f"kill with {arguments.keys} keys and {arguments.connections} connections; median (least..most)", kills)
        print_runs(f"start from a journal of {arguments.keys} inserts without a snapshot", replays)


if __name__ == "__main__":
    sys.exit(main())
