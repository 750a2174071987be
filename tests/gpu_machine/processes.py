"""What the experiments share beside the GPU: lines of the summary, children that end with their parent, files as signals,
and a `muster serve` with its REST API. `run` sets MUSTER, PLUGIN and, if the pack has one, NEW_NCCL to the paths of the
files under test."""

import atexit
import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

STARTED = float(os.environ.setdefault("GPU_MACHINE_STARTED", repr(time.time())))
# Two ranks of one communicator on one GPU: NCCL 2.32 allows them if it is asked.
TWO_RANKS_ON_ONE_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2", "NCCL_NVLS_ENABLE": "0"}
CHILDREN = []
LIBC = ctypes.CDLL(None)


def log(*words):
    print(f"{time.time() - STARTED:8.3f}", *words, flush=True)


def report(*words):
    """Prints a line of the summary."""
    print("SUMMARY", *words, flush=True)


def start(command, log_file=None, env=None, **options):
    """Starts a child in a group of its own, which is killed when this process ends."""
    variables = dict(os.environ)
    for name, value in (env or {}).items():
        if value is None:
            variables.pop(name, None)
        else:
            variables[name] = str(value)
    if log_file:
        os.makedirs(os.path.dirname(log_file), exist_ok=True)
        options |= {"stdout": open(log_file, "ab"), "stderr": subprocess.STDOUT}
    child = subprocess.Popen(command, env=variables, start_new_session=True, preexec_fn=kill_with_parent, **options)
    CHILDREN.append(child)
    return child


def kill_with_parent():
    LIBC.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def limit_life(seconds):
    """In a child: ends it with its parent, and after some time in any case."""
    kill_with_parent()
    signal.alarm(seconds)


def kill(child, number=signal.SIGKILL):
    try:
        os.killpg(child.pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def wait(child, seconds):
    """Returns the child's status; a child that takes longer is killed, and the status is None."""
    try:
        return child.wait(seconds)
    except subprocess.TimeoutExpired:
        kill(child)
        return None


@atexit.register
def kill_children():
    for child in CHILDREN:
        kill(child)


def stop(number, _frame):
    kill_children()
    os._exit(128 + number)


if threading.current_thread() is threading.main_thread():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)


def put_file(path, data=b""):
    with open(path + ".part", "wb") as file:
        file.write(data)
    os.rename(path + ".part", path)


def wait_for_file(path, seconds, child=None):
    """Returns whether the file came; gives up early if the child that would write it has ended."""
    limit = time.time() + seconds
    while not os.path.exists(path):
        if time.time() > limit or child is not None and child.poll() is not None:
            return os.path.exists(path)
        time.sleep(0.002)
    return True


def read_text(path):
    try:
        return open(path, errors="replace").read()
    except OSError:
        return ""


def show_log(path):
    """Prints the log of a child; its lines of the summary become lines of this process's summary."""
    print(f"--- {path}\n{read_text(path)[-40000:]}", flush=True)


def find_packaged_nccl():
    """Returns the path of the libnccl.so.2 that Python's packages use, or an empty text."""
    code = "import nvidia.nccl as n, os; print(os.path.join(list(n.__path__)[0], 'lib', 'libnccl.so.2'))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()
    return found if os.path.exists(found) else ""


def with_new_nccl(command):
    """Returns a command and variables under which unmodified programs load NEW_NCCL: in a mount namespace where it lies over
    the package's library, or by LD_PRELOAD."""
    new, packaged = os.environ.get("NEW_NCCL"), find_packaged_nccl()
    if not new or not packaged:
        return command, {}
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        return command, {"LD_PRELOAD": new}
    script = 'mount --bind "$0" "$1" || export LD_PRELOAD="$0"; shift; exec "$@"'
    return ["unshare", "-m", "--propagation", "private", "bash", "-c", script, new, packaged, *command], {}


def list_loaded(name):
    """Returns the mapped files of this process whose paths contain the name."""
    paths = {line.split(None, 5)[-1].strip() for line in open("/proc/self/maps")}
    return sorted(path for path in paths if path.startswith("/") and name in path)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Service:
    """A `muster serve` of this experiment."""

    def __init__(self, folder, *arguments):
        self.address, http = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        self.url, self.log_file = f"http://{http}", os.path.join(folder, "serve.log")
        command = [os.environ["MUSTER"], "serve", "--ephemeral", "--grpc", self.address, "--http", http, *arguments]
        self.child = start(command, self.log_file)
        limit = time.time() + 10
        while "error" in self.get("/jobs"):
            if time.time() > limit or self.child.poll() is not None:
                report("muster serve does not answer:", read_text(self.log_file)[-400:])
                sys.exit(1)
            time.sleep(0.05)

    def get(self, path):
        try:
            return json.loads(urllib.request.urlopen(f"{self.url}/api/v1{path}", timeout=5).read())
        except urllib.error.HTTPError as error:
            return {"status": error.code, "body": error.read()[:300].decode(errors="replace")}
        except (OSError, ValueError) as error:
            return {"error": repr(error)}

    def cli(self, *arguments):
        command = [os.environ["MUSTER"], *arguments, "--server", self.url]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=10)
        except subprocess.TimeoutExpired:
            return "(timed out)"
        return (done.stdout + done.stderr).strip()

    def report_collectives(self, title):
        """Reports what `muster collectives` says of the job, without its heading."""
        text = self.cli("collectives")
        print(f"### {title}\n{text}")
        report(f"{title}:", " | ".join(re.sub(" +", " ", line) for line in text.splitlines() if "CLIQUE" not in line)[:400])

    def report_members(self):
        for clique in self.get("/jobs/default/collectives").get("cliques", [])[:3]:
            members = self.get("/jobs/default/collectives/" + clique["clique"])
            print("### REST", json.dumps(members, indent=1)[:6000])
            functions = ", ".join(f"{f['function']} x{f.get('operations')}" for f in clique["functions"])
            ranks = [f"{m['rank']} is task {m.get('task')}" for m in members.get("members", [])]
            report(f"clique {clique['clique']}: {functions}; ranks: {', '.join(ranks)}")

    def report_findings(self, title):
        found = self.get("/jobs/default/findings")
        print("### findings", json.dumps(found, indent=1)[:4000])
        texts = [f"{f.get('title')}: {f.get('summary')}" for f in found.get("open", []) + found.get("closed", [])]
        report(f"{title}:", "; ".join(texts)[:300] or "none")

    def end(self):
        print("### events", *map(json.dumps, self.get("/jobs/default/events?newest=true&limit=200").get("events", [])), sep="\n")
        kill(self.child, signal.SIGTERM)
        wait(self.child, 3)
        show_log(self.log_file)
