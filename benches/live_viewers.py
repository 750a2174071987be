#!/usr/bin/env python3
"""Measures what viewers of the live page of a large job cost the server.

    benches/live_viewers.py --muster target/release/muster [--tasks 10000] [--hosts 1250] [--story healthy]
                            [--viewers 10] [--seconds 60] [--page /jobs/simulation]

The server and the simulated tasks run in processes of their own. The processor time of the server alone is read from
/proc, first without viewers and then with them, and once more without. Each viewer opens the page, and follows its
stream with the digests of the fragments of the page, as the script of the pages does.
"""

import argparse
import html
import http.client
import os
import re
import subprocess
import sys
import threading
import time
from urllib.parse import quote, urlsplit

from service import start_service


def cpu_seconds(pid: int) -> float:
    """Returns the processor time of a process, of the system on its behalf included."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Viewer(threading.Thread):
    """Opens a page and follows its stream."""

    def __init__(self, server: str, page: str) -> None:
        super().__init__(daemon=True)
        self.address, self.page = urlsplit(server).netloc, page
        self.messages = self.bytes = 0
        self.stopped = False

    def run(self) -> None:
        connection = http.client.HTTPConnection(self.address, timeout=60)
        connection.request("GET", self.page, headers={"accept": "text/html"})
        text = connection.getresponse().read().decode()
        self.page_bytes = len(text)
        live = re.search(r'data-live="([^"]+)"', text)
        assert live is not None, "the page has no live updates"
        parts = re.findall(r'class="part" id="([a-z-]+)" data-tag="([0-9a-f]+)"', text)
        have = quote(",".join(f"{name}:{tag}" for name, tag in parts), safe="")
        connection.close()
        connection = http.client.HTTPConnection(self.address, timeout=60)
        path = f"{html.unescape(live.group(1))}&have={have}"
        connection.request("GET", path, headers={"accept": "text/event-stream"})
        stream = connection.getresponse()
        assert stream.status == 200, stream.status
        while not self.stopped:
            line = stream.readline()
            if not line:
                return
            self.messages += line.startswith(b"event:")
            self.bytes += len(line)
        connection.close()


def measure(server: "subprocess.Popen[str]", seconds: float) -> float:
    """Returns the share of one core that the server uses, in percent."""
    began, cpu = time.monotonic(), cpu_seconds(server.pid)
    time.sleep(seconds)
    return 100 * (cpu_seconds(server.pid) - cpu) / (time.monotonic() - began)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--muster", default="target/release/muster")
    parser.add_argument("--tasks", default="10000")
    parser.add_argument("--hosts", default="1250")
    parser.add_argument("--story", default="healthy")
    parser.add_argument("--viewers", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--page", default="/jobs/simulation")
    given = parser.parse_args()
    # The simulation makes a job of its own beside the default one.
    command = [given.muster, "serve", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", "--tasks", "1"]
    server, _, http_address = start_service(command, stderr=subprocess.STDOUT)
    address = f"http://{http_address}"
    size = ["--tasks", given.tasks, "--hosts", given.hosts, "--story", given.story]
    tasks = subprocess.Popen([given.muster, "simulate", "--server", address, *size], stdout=subprocess.DEVNULL)
    try:
        # All tasks register and make their first steps.
        time.sleep(15)
        without = [measure(server, given.seconds)]
        viewers = [Viewer(address, given.page) for _ in range(given.viewers)]
        for viewer in viewers:
            viewer.start()
        # The loading of the pages is not measured.
        time.sleep(3)
        for viewer in viewers:
            viewer.messages = viewer.bytes = 0
        with_viewers = measure(server, given.seconds)
        messages, received = (sum(getattr(viewer, name) for viewer in viewers) for name in ("messages", "bytes"))
        if not all(viewer.is_alive() for viewer in viewers):
            raise SystemExit("a viewer has lost its stream")
        for viewer in viewers:
            viewer.stopped = True
        time.sleep(12)
        without.append(measure(server, given.seconds))
        tasks_end = tasks.poll()
        if tasks_end is not None:
            raise SystemExit(f"the simulated tasks ended with status {tasks_end}")
    finally:
        tasks.kill()
        server.kill()
    base = sum(without) / len(without)
    print(f"{given.tasks} tasks, story {given.story}, {given.viewers} viewers of {given.page}, {given.seconds:.0f} s each:")
    print(f"  server without viewers  {without[0]:.2f} % and {without[1]:.2f} % of one core")
    print(f"  server with viewers     {with_viewers:.2f} %")
    print(f"  the viewers cost        {with_viewers - base:.2f} %")
    print(f"  each received           {messages / given.viewers / given.seconds:.2f} messages/s, "
          f"{received / given.viewers / given.seconds / 1024:.1f} KiB/s; the page has {viewers[0].page_bytes / 1024:.0f} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
