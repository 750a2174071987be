#!/usr/bin/env python3
"""Measures acknowledged inserts whose records are on the disk, of Muster and of etcd, in alternation on one disk.

    benches/durable_inserts.py --muster target/release/muster [--clients 1,8,64] [--requests 20000] [--repeat 5] [--folder DIR]

Needs `h2load` (nghttp2-client) and `etcd` (etcd-server). Both servers run with their defaults, Muster with `--durability host`.
h2load sends the same request on each of its connections, one at a time: an insert of 64 bytes that replaces the value. An answer
counts only if the server has made the change, which is checked by its own count at the end.
"""

import argparse
import base64
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

from service import start_service

VALUE = b"v" * 64


def varint(number):
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def field(number, value):
    return varint(number << 3 | 2) + varint(len(value)) + value


def framed(message):
    return b"\0" + len(message).to_bytes(4, "big") + message


class Muster:
    name = "Muster, --durability host"
    path = "/tensorflow.CoordinationService/InsertKeyValue"
    # kv { key, value }, allow_overwrite
    body = framed(field(1, field(1, b"bench/key") + field(2, VALUE)) + b"\x10\x01")

    def __init__(self, arguments, folder):
        command = [arguments.muster, "serve", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", "--tasks", "1", "--log", "error"]
        command += ["--durability", "host", "--no-keeper", "--data-dir", os.path.join(folder, "journal")]
        self.process, self.address, self.http = start_service(command)

    def done(self):
        """The inserts so far that were answered without an error."""
        with urllib.request.urlopen(f"http://{self.http}/metrics") as answer:
            text = answer.read().decode()
        counts = re.findall(r'^muster_rpc_calls_total\{[^}]*method="InsertKeyValue"[^}]*code="OK"[^}]*\} (\d+)', text, re.M)
        return sum(map(int, counts))


class Etcd:
    name = "etcd"
    path = "/etcdserverpb.KV/Put"
    body = framed(field(1, b"bench/key") + field(2, VALUE))

    def __init__(self, arguments, folder):
        self.address = "127.0.0.1:23790"
        command = ["etcd", "--data-dir", os.path.join(folder, "etcd"), "--listen-client-urls", f"http://{self.address}"]
        command += ["--advertise-client-urls", f"http://{self.address}", "--listen-peer-urls", "http://127.0.0.1:23800"]
        self.process = subprocess.Popen(command + ["--log-level", "error"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(200):
            time.sleep(0.1)
            try:
                self.done()
                return
            except OSError:
                pass
        raise SystemExit("etcd has not started")

    def done(self):
        body = json.dumps({"key": base64.b64encode(b"bench/key").decode()}).encode()
        with urllib.request.urlopen(f"http://{self.address}/v3/kv/range", body) as answer:
            return int(json.load(answer)["header"]["revision"])


def measure(server, clients, requests, folder):
    body, log = os.path.join(folder, "body"), os.path.join(folder, "log")
    with open(body, "wb") as file:
        file.write(server.body)
    before = server.done()
    command = ["h2load", "-n", str(requests), "-c", str(clients), "-m", "1", "-t", "1", "-d", body, "--log-file", log]
    command += ["-H", "content-type: application/grpc", "-H", "te: trailers", f"http://{server.address}{server.path}"]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    made = server.done() - before
    assert made == requests, f"{server.name} has made {made} of {requests} inserts:\n{told}"
    rate = float(re.search(r"finished in .*?, ([0-9.]+) req/s", told)[1])
    with open(log, encoding="ascii") as file:
        times = sorted(int(line.split()[2]) for line in file)
    os.unlink(log)
    return rate, times[len(times) // 2], times[len(times) * 99 // 100]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--muster", required=True)
    parser.add_argument("--clients", default="1,8,64")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--folder", default=None, help="a folder on the disk to be measured")
    arguments = parser.parse_args()
    for tool in ("h2load", "etcd"):
        if not shutil.which(tool):
            raise SystemExit(f"{tool} is missing: apt-get install nghttp2-client etcd-server")
    with tempfile.TemporaryDirectory(prefix="muster-inserts-", dir=arguments.folder) as folder:
        servers = [Muster(arguments, folder), Etcd(arguments, folder)]
        try:
            for clients in map(int, arguments.clients.split(",")):
                results = {server.name: [] for server in servers}
                for turn in range(arguments.repeat):
                    for server in servers if turn % 2 == 0 else reversed(servers):
                        requests = max(clients, arguments.requests if clients > 1 else arguments.requests // 10)
                        results[server.name].append(measure(server, clients, requests, folder))
                print(f"{clients} client(s), {arguments.repeat} runs each, median (least..most)")
                for name, runs in results.items():
                    rates, halves, tails = zip(*runs)
                    print(
                        f"  {name:26} {statistics.median(rates):8.0f} inserts/s ({min(rates):.0f}..{max(rates):.0f}), "
                        f"p50 {statistics.median(halves) / 1000:.2f} ms, p99 {statistics.median(tails) / 1000:.2f} ms"
                    )
                ratios = sorted(ours[0] / theirs[0] for ours, theirs in zip(*results.values()))
                print(f"  ratio of the rates         {statistics.median(ratios):8.2f} ({ratios[0]:.2f}..{ratios[-1]:.2f})")
        finally:
            for server in servers:
                server.process.terminate()
                server.process.wait(timeout=60)


if __name__ == "__main__":
    sys.exit(main())
