"""The wheel: what is in it, its types, and the command."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
import re
import signal
import subprocess
import time

import pytest

from conftest import PATIENCE_S, ROOT, TARGET, TOOLS, clean_environment, interpreter, skip

import muster

BINARY = ROOT / "target/debug/muster"
COMMANDS = {"wheel": [TOOLS / "bin/muster"], "module": [TOOLS / "bin/python", "-m", "muster"]}


def run(command, *arguments: str, timeout: float = PATIENCE_S, **how) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, *arguments], env=clean_environment(), capture_output=True, text=True, timeout=timeout, **how
    )


@pytest.fixture(params=COMMANDS)
def command(request):
    return COMMANDS[request.param]


def test_one_wheel_has_everything_and_needs_nothing():
    [wheel] = (TARGET / "wheel").glob("*.whl")
    assert "-cp310-abi3-" in wheel.name and wheel.name.startswith("muster_jax-"), wheel.name
    assert metadata.requires("muster-jax") is None
    assert metadata.version("muster-jax") == muster.__version__
    files = {str(file) for file in metadata.files("muster-jax") or []}
    for wanted in ("muster/py.typed", "muster/_native.pyi", "muster/_native.abi3.so", "muster/jax/__init__.py"):
        assert wanted in files, files
    assert any(file.endswith("bin/muster") for file in files), files
    assert not any("src" in file or file.endswith(".toml") for file in files), files
    assert "Muster" in metadata.metadata("muster-jax").get_payload(), "the documentation is its description"


def test_importing_it_imports_neither_numpy_nor_jax(release):
    code = "import sys, muster; print(sorted({'jax', 'jaxlib', 'numpy'} & set(sys.modules)))"
    done = run([interpreter(release), "-c", code])
    assert done.stdout == "[]\n", done


# Two tasks without NumPy and JAX, of which one sends a mebibyte to the other.
TRANSFER = """
import sys, muster
agent = muster.join(sys.argv[1], 2, me := int(sys.argv[2]), timeout=60)
engine, sent = agent.engine(), bytes(range(256)) * 4096
if me == 0:
    engine.send(sent, to=1, key="k").wait(60)
else:
    received = bytearray(len(sent))
    engine.receive(received, source=0, key="k").wait(60)
    assert received == sent
print("MOVED", sys.version_info[1], flush=True)
agent.barrier("end", 60)
agent.leave()
"""


@pytest.mark.parametrize("minor", [11, 13])
def test_a_transfer_runs_on_an_interpreter(request, scene, minor):
    python = TARGET / f"python3.{minor}/bin/python"
    if not python.exists():
        skip(request, f"Python 3.{minor}", "install it, then run tests/python/setup")
    server = scene.serve("--tasks", "2")
    tasks = [scene.start([python, "-c", TRANSFER, server.grpc, str(task)]) for task in range(2)]
    for program in tasks:
        assert f"MOVED {minor}" in program.succeed()


def test_the_one_wheel_runs_on_every_interpreter():
    found = sorted(TARGET.glob("python3.*/bin/python"))
    assert len(found) >= 2, "one interpreter shows little: install others, then run tests/python/setup"
    for python in found:
        # None of them has NumPy or JAX.
        code = "import sys, muster; print(sys.version_info[1], muster.Agent, muster.Client())"
        done = run([python, "-c", code])
        assert done.stdout.startswith(python.parents[1].name.removeprefix("python3.") + " "), done
        done = run([python.with_name("muster")], "--version")
        assert done.stdout == f"muster {muster.__version__}\n", done


def test_the_package_is_typed():
    done = run(
        [TOOLS / "bin/mypy", "--cache-dir", TARGET / "mypy", "--python-executable", interpreter("0.10.2")], cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check_by_pyright(ROOT)


def check_by_pyright(folder: Path) -> None:
    """Checks the files that the configuration of a folder names."""
    # Without a look whether there is a newer one.
    env = clean_environment(PYRIGHT_PYTHON_IGNORE_WARNINGS="1")
    pyright = [TOOLS / "bin/pyright", "--pythonpath", interpreter("0.10.2")]
    done = subprocess.run(pyright, cwd=folder, env=env, capture_output=True, text=True, timeout=2 * PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_programs_of_the_readmes_and_guides_are_typed(tmp_path):
    pages = [ROOT / "README.md", ROOT / "python/README.md", *sorted((ROOT / "web/guide").glob("*.md"))]
    programs = []
    for page in pages:
        for name, text in re.findall(r"```python\n# (\w+)\.py\n(.*?)```", page.read_text(), re.DOTALL):
            # Two pages may have programs of one name.
            programs.append(tmp_path / f"{page.relative_to(ROOT).as_posix().removesuffix('.md').replace('/', '_')}_{name}.py")
            programs[-1].write_text(text)
    assert len(programs) >= 12, programs
    # Functions need no annotations: neither those of the programs, whose bodies are checked all the same, nor those of JAX.
    untyped = ("--allow-untyped-defs", "--allow-incomplete-defs", "--check-untyped-defs", "--allow-untyped-calls")
    # The first run reads the whole of JAX, which takes longer than other commands; later ones find it in the cache.
    mypy = [TOOLS / "bin/mypy", "--strict", *untyped, "--cache-dir", TARGET / "mypy", "--python-executable", interpreter("0.10.2")]
    done = run([*mypy, *programs], cwd=tmp_path, timeout=4 * PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    check_by_pyright(tmp_path)


def test_a_program_that_uses_it_is_checked_against_its_types(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import muster\n\nmuster.Client(timeout='soon')\nmuster.Client().tasks()[0].incarnations\n")
    done = run([TOOLS / "bin/mypy", "--strict", program], cwd=tmp_path)
    assert 'has incompatible type "str"; expected "float"' in done.stdout, done.stdout
    assert '"Task" has no attribute "incarnations"' in done.stdout, done.stdout
    assert done.stdout.endswith("Found 2 errors in 1 file (checked 1 source file)\n"), done.stdout


CALLS = {
    "version": ["--version"],
    "help": ["help", "launch"],
    "wrong": ["lunch"],
    "wrong argument": ["launch", "-n", "0", "--", "true"],
    "settings": ["config", "print"],
    "no such command": ["launch", "-n", "1", "--", "no-such-command"],
    "no server": ["status", "--server", "http://127.0.0.1:1"],
    "completions": ["completions", "bash"],
}


@pytest.mark.parametrize("call", CALLS)
def test_the_command_answers_as_the_binary_does(command, call):
    mine, theirs = run(command, *CALLS[call]), run([BINARY], *CALLS[call])
    assert (mine.returncode, mine.stdout, mine.stderr) == (theirs.returncode, theirs.stdout, theirs.stderr)


def test_a_reader_that_goes_away_ends_the_command_as_it_ends_the_binary(command):
    ends = []
    for of in (command, [BINARY]):
        process = subprocess.Popen([*of, "completions", "bash"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        process.stdout.close()
        said = process.stderr.read()
        ends.append((process.wait(PATIENCE_S), said))
    assert ends[0] == ends[1]


def test_a_launch_ends_with_the_code_of_its_process(command):
    ignored = []
    for of in (command, [BINARY]):
        done = run(of, "launch", "-n", "2", "--", "sh", "-c", "echo $MUSTER_PROCESS_ID; [ $MUSTER_PROCESS_ID = 0 ] || exit 3")
        assert done.returncode == 3 and "[0] 0" in done.stdout and "[1] 1" in done.stdout, done
        done = run(of, "launch", "-n", "1", "--", "sh", "-c", "kill -KILL $$")
        assert done.returncode == 137, done
        # As the binary, it does not hand on what Python did to signals: a task dies of SIGPIPE, and can be interrupted.
        done = run(of, "launch", "-n", "1", "--", "sh", "-c", "grep -E 'SigIgn' /proc/self/status")
        ignored.append(done.stdout)
    assert ignored[0] == ignored[1] and "SigIgn" in ignored[0]


def test_ctrl_c_ends_a_server_and_a_client_as_it_ends_the_binary(scene, command):
    ends = []
    for of in (command, [BINARY]):
        server = scene.start([*of, "serve", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", "--tasks", "1"])
        http = server.line(r"HTTP\s+(http://\S+)")[1]
        follower = scene.start([*of, "events", "--follow", "--server", http.rstrip("/")])
        follower.line("run")
        follower.process.send_signal(signal.SIGINT)
        code = follower.end()
        server.process.send_signal(signal.SIGINT)
        ends.append((code, server.end()))
    assert ends[0] == ends[1]
    assert not any("Traceback" in program.text() for program in scene.programs)


def test_no_task_outlives_a_launch_that_is_killed(scene, command):
    launch = scene.start([*command, "launch", "-n", "2", "--", "sh", "-c", "echo pid=$$; exec sleep 1000"])
    pids = [int(launch.line(rf"\[{task}\] pid=(\d+)")[1]) for task in range(2)]
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    launch.kill()
    end = time.monotonic() + PATIENCE_S
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < end, f"{pids} still run"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


