"""What the tests share: the JAX releases, a server, and programs that run in the environments of `setup`."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
import queue
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from _pytest.runner import runtestprotocol

import muster

# A shell starts background jobs with SIGINT ignored, and every program that a test starts would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TARGET = ROOT / "target/python"
TOOLS = TARGET / "tools"

# The deadline of every wait, long enough for the slowest machine.
PATIENCE_S = 90.0
# The package's message when it ends a process whose gloo waits for an operation that it has forgotten.
GLOO_LOST = "gloo has lost an operation"

RELEASES = [
    fields[0]
    for line in (ROOT / "tests/jax/versions").read_text().splitlines()
    if (fields := line.partition("#")[0].split())
]


# Those for which `setup` installs Orbax, and what serialises exported programs.
ORBAX_RELEASES = ["0.10.2", "0.12.0"]


def clean_environment(**variables: str) -> dict[str, str]:
    """The environment without whatever says where a service or a job is."""
    ours = ("MUSTER_", "JAX_", "OMPI_", "SLURM_", "PYTHON", "XLA_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return env | {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1", "TF_CPP_MIN_LOG_LEVEL": "1"} | variables


class Program:
    """A running program and the lines that it has written so far, standard error included."""

    def __init__(self, command: list[str | Path], env: dict[str, str], **how) -> None:
        self.command = command
        self.process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **how
        )
        self.lines: list[str] = []
        self.coming: queue.Queue[str | None] = queue.Queue()
        self.is_read = False  # whether `coming` has been emptied, up to the end of the output
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.coming.put(line.rstrip("\n"))
        self.coming.put(None)

    def line(self, pattern: str) -> re.Match[str]:
        """Waits for a line in which the pattern is found, among those that came already as well."""
        for line in self.lines:
            if found := re.search(pattern, line):
                return found
        end = time.monotonic() + PATIENCE_S
        while (left := end - time.monotonic()) > 0:
            try:
                line = self.coming.get(timeout=left)
            except queue.Empty:
                break
            self._take(line)
            if line is None:
                raise AssertionError(f"it ended without {pattern!r}:\n{self.text()}")
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"{pattern!r} did not come:\n{self.text()}")

    def next(self, pattern: str) -> re.Match[str]:
        """Waits for such a line among those that have not been read yet."""
        seen, self.lines = self.lines, []
        try:
            return self.line(pattern)
        finally:
            self.lines = seen + self.lines

    def end(self) -> int:
        """Waits for the end; returns the exit code, or minus the signal."""
        try:
            code = self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"it did not end:\n{self.text()}") from None
        while not self.is_read:
            self._take(self.coming.get(timeout=PATIENCE_S))
        return code

    def succeed(self) -> str:
        code = self.end()
        assert code == 0, f"exit code {code}:\n{self.text()}"
        return self.text()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()

    def rest(self) -> str:
        """Everything that a program has written which has ended; what its own children may still write is not waited for."""
        with contextlib.suppress(queue.Empty):
            while not self.is_read:
                self._take(self.coming.get(timeout=1))
        return self.text()

    def _take(self, line: str | None) -> None:
        if line is None:
            self.is_read = True
        else:
            self.lines.append(line)

    def text(self) -> str:
        return "\n".join([" ".join(map(str, self.command)), *self.lines])


class Server:
    """A running `muster serve`, of the wheel."""

    def __init__(self, start, *arguments: str) -> None:
        command = [TOOLS / "bin/muster", "serve", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", *arguments]
        self.program: Program = start(command)
        self.http = self.program.line(r"^\s+HTTP\s+(http://\S+)")[1].rstrip("/")
        from muster import _client

        about = _client.Client(self.http)._get("/api/v1/server")
        self.grpc: str = about["grpc"][0]["address"]
        self.client = muster.Client(self.http)

    def until(self, what: str, holds):
        """Waits until `holds` returns something true of the job, and returns it."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            if seen := holds(job := self.client.job()):
                return seen
            time.sleep(0.02)
        raise AssertionError(f"not in time: {what}\n{job}")


class Scene:
    """Starts programs, and ends them with the test."""

    def __init__(self) -> None:
        self.programs: list[Program] = []

    def start(self, command: list[str | Path], cwd: Path | None = None, **variables: str) -> Program:
        program = Program(command, clean_environment(**variables), cwd=cwd)
        self.programs.append(program)
        return program

    def serve(self, *arguments: str) -> Server:
        return Server(self.start, *arguments)

    def python(self, release: str, code: str, *arguments: str, **variables: str) -> Program:
        """Runs code with the JAX of a release."""
        return self.start([interpreter(release), "-c", code, *arguments], **variables)

    def close(self) -> None:
        for program in self.programs:
            program.kill()
        for program in self.programs:
            if GLOO_LOST in program.rest():
                print(f"{GLOO_LOST}: {' '.join(map(str, program.command))[:200]}")


def skip(request, what: str, remedy: str) -> None:
    """Skips a test for what is not installed, and counts it as tests/support/skip.rs does; in CI that is a failure."""
    if os.environ.get("MUSTER_CI"):
        pytest.fail(f"{what} is not installed: {remedy}")
    if skips := os.environ.get("MUSTER_SKIPS"):
        with open(skips, "a", encoding="utf-8") as file:
            file.write(f"{what} is not installed\tpython {request.node.name}\n")
    pytest.skip(f"{what} is not installed: {remedy}")


def interpreter(release: str) -> Path:
    return TARGET / release / "bin/python"


def orbax_interpreter(release: str) -> Path:
    return TARGET / f"orbax-{release}" / "bin/python"


@pytest.fixture
def scene():
    made = Scene()
    try:
        yield made
    finally:
        made.close()


# For tests in which the releases differ little: the oldest and the latest one.
outer_releases = pytest.mark.parametrize("release", [RELEASES[0], RELEASES[-1]], indirect=True)


@pytest.fixture(params=RELEASES)
def release(request) -> str:
    """Each JAX release for which there is an environment."""
    if not interpreter(request.param).exists():
        skip(request, f"JAX {request.param}", "run tests/jax/setup, then tests/python/setup")
    return request.param


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    """What the caller's environment says of services is not what a test means."""
    for name in list(os.environ):
        if name.startswith(("MUSTER_", "JAX_", "OMPI_", "SLURM_")) and name not in ("MUSTER_CI", "MUSTER_JAX_ENVS", "MUSTER_SKIPS"):
            monkeypatch.delenv(name)


def pytest_make_parametrize_id(val) -> str | None:
    """Makes each name of a test one word, as `tests/run` reads it."""
    return val.replace(" ", "-") if isinstance(val, str) else None


def pytest_report_header() -> str:
    return f"muster {muster.__version__} from {muster.__file__}, Python {sys.version.split()[0]}"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    """Runs a failed test again, up to twice, if gloo lost an operation in one of its processes, which ends that process.

    It happens in about one of a thousand kills, and is a defect of gloo. The test is named in a warning, and in the file that
    MUSTER_FLAKES names. Any other failure stands.
    """
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for is_last in (False, False, True):
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        lost = any(GLOO_LOST in report.capstdout for report in reports)
        if is_last or not lost or not any(report.failed for report in reports):
            break
        item.warn(pytest.PytestWarning(f"{item.nodeid}: {GLOO_LOST}; it runs again"))
        if flakes := os.environ.get("MUSTER_FLAKES"):
            with open(flakes, "a", encoding="utf-8") as file:
                file.write(f"{item.nodeid} ({GLOO_LOST})\n")
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
