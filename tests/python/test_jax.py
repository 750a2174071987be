"""muster.jax: real JAX processes of every release join a job."""

from __future__ import annotations

import re
import signal
import subprocess
import time

import pytest

from conftest import PATIENCE_S, ROOT, TOOLS, Scene, clean_environment, interpreter, outer_releases, skip

# A process does this once it has joined: a sum over all processes, and a farewell.
WORK = """
import jax, numpy as np
from jax.experimental import multihost_utils
from jax._src import distributed
total = multihost_utils.process_allgather(np.array([jax.process_index() + 1])).sum()
print("SUM", jax.process_index(), jax.process_count(), total, "own service:", distributed.global_state.service is not None, flush=True)
jax.distributed.shutdown()
"""
GLOO = """
import jax
try: jax.config.update("jax_cpu_collectives_implementation", "gloo")
except AttributeError: pass
"""
INITIALIZE = "import muster.jax, sys, os\n" + GLOO
# The end of a process that does nothing after it has joined, with the server's URL as its last argument. jaxlib ends a process by
# SIGABRT ("Socket closed") if it shuts down while its thread that polls for errors is about to ask, because it then has no call
# yet to cancel: so the question is waited for.
LEAVE = """
import time, urllib.request
while b'waits_for="error"} 1' not in urllib.request.urlopen(sys.argv[-1] + '/metrics').read():
    time.sleep(0.01)
jax.distributed.shutdown()
"""


def place(server, process: int, count: int) -> dict[str, str]:
    return {
        "JAX_COORDINATOR_ADDRESS": server.grpc,
        "MUSTER_PROCESS_ID": str(process),
        "MUSTER_NUM_PROCESSES": str(count),
    }


def sums(programs) -> list[str]:
    return sorted(found for program in programs for found in re.findall(r"SUM (.*)", program.succeed()))


def test_initialize_joins_without_a_service_in_process_0(scene, release):
    server = scene.serve("--tasks", "2")
    code = INITIALIZE + "muster.jax.initialize(sys.argv[1], 2, int(sys.argv[2]), initialization_timeout=60)\n" + WORK
    programs = [scene.python(release, code, server.grpc, str(process)) for process in range(2)]
    assert sums(programs) == ["0 2 3 own service: False", "1 2 3 own service: False"]
    server.until("the run has ended well", lambda job: job.run.state == "completed")


def test_initialize_finds_everything_in_the_environment(scene, release):
    server = scene.serve("--tasks", "2")
    code = INITIALIZE + "muster.jax.initialize()\n" + WORK
    programs = [scene.python(release, code, **place(server, process, 2)) for process in range(2)]
    assert sums(programs) == ["0 2 3 own service: False", "1 2 3 own service: False"]


def slurm(process: int, count: int) -> dict[str, str]:
    """The variables of a process of a step that srun has started."""
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "nosuchhost[1-2]",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_NTASKS": str(count),
        "SLURM_STEP_NUM_TASKS": str(count),
        "SLURM_PROCID": str(process),
        "SLURM_LOCALID": str(process),
    }


def open_mpi_5(process: int, count: int) -> dict[str, str]:
    return {
        "OMPI_VERSION": "5.0.7",
        "OMPI_COMM_WORLD_RANK": str(process),
        "OMPI_COMM_WORLD_SIZE": str(count),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(process),
    }


def open_mpi_4(process: int, count: int) -> dict[str, str]:
    uri = "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"
    return open_mpi_5(process, count) | {"OMPI_VERSION": "4.1.6", "OMPI_MCA_orte_hnp_uri": uri}


def indexed_job(process: int, count: int) -> dict[str, str]:
    """The variables of a pod of an indexed job of Kubernetes. They do not have the number of pods."""
    return {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": str(process)}


def job_set(process: int, count: int) -> dict[str, str]:
    """The variables of a pod of a JobSet of two jobs of one pod each."""
    variables = {"JOBSET_NAME": "train", "JOB_INDEX": str(process), "PROCESSES_IN_JOB": "1", "JOB_COMPLETION_INDEX": "0"}
    return variables | {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}


LAUNCHERS = {of.__name__: of for of in (slurm, open_mpi_4, open_mpi_5, indexed_job, job_set)}


@outer_releases
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_numbers_of_the_processes_come_from_the_launcher(scene, release, launcher):
    server = scene.serve("--tasks", "2")
    # The one finds the service and its number by JAX's own initialize(), the other by Muster's.
    calls = ["import muster.jax\n" + GLOO + "jax.distributed.initialize()\n", INITIALIZE + "muster.jax.initialize()\n"]
    programs = [
        scene.python(release, call + WORK, MUSTER_COORDINATOR_ADDRESS=server.grpc, **LAUNCHERS[launcher](process, 2))
        for process, call in enumerate(calls)
    ]
    assert sums(programs) == ["0 2 3 own service: True", "1 2 3 own service: False"]
    server.until("the run has ended well", lambda job: job.run.state == "completed")


@pytest.mark.parametrize("launcher", ["slurm", "open_mpi_4"])
def test_jax_alone_takes_its_numbers_from_the_launcher(scene, release, launcher):
    server = scene.serve("--tasks", "2")
    variables = {"JAX_COORDINATOR_ADDRESS": server.grpc, "JAX_COORDINATOR_BIND_ADDRESS": "127.0.0.1:0"}
    programs = [
        scene.python(release, GLOO + "jax.distributed.initialize()\n" + WORK, **variables, **LAUNCHERS[launcher](process, 2))
        for process in range(2)
    ]
    assert sums(programs) == ["0 2 3 own service: True", "1 2 3 own service: False"]
    server.until("the run has ended well", lambda job: job.run.state == "completed")


# Numbers that differ from those of MUSTER_*.
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "nosuchhost",
    "SLURM_NTASKS": "99",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_NODES": "1",
}


def test_importing_it_is_enough_for_jax_to_find_the_service_under_slurm_as_well(scene, release):
    server = scene.serve("--tasks", "2")
    code = "import muster.jax\n" + GLOO + "jax.distributed.initialize()\n" + WORK
    programs = [scene.python(release, code, **place(server, process, 2), **SLURM) for process in range(2)]
    # JAX's own initialize() starts its service; at a port of this machine that nobody uses.
    assert sums(programs) == ["0 2 3 own service: True", "1 2 3 own service: False"]


def test_a_launched_program_needs_neither_arguments_nor_an_import(scene, release):
    launch = scene.start(
        [TOOLS / "bin/muster", "launch", "-n", "2", "--", interpreter(release), "-c", GLOO + "jax.distributed.initialize()\n" + WORK],
        **SLURM,
        OMPI_VERSION="5.0.1",
    )
    text = launch.succeed()
    assert sorted(re.findall(r"SUM (\d+ \d+ \d+)", text)) == ["0 2 3", "1 2 3"], text


def test_the_detection_can_be_turned_off(scene, release):
    server = scene.serve("--tasks", "1")
    code = "import muster.jax, jax\ntry: jax.distributed.initialize()\nexcept ValueError as error: print('VALUE', error)\n"
    program = scene.python(release, code, **place(server, 0, 1), MUSTER_JAX_DETECTION="0")
    assert "VALUE Number of processes must be defined" in program.succeed()


# The import with a release that says that it is another one, or that lacks a private name.
IMPORT = """
import logging, sys
import jax, jaxlib.version
{before}
try: import muster.jax
except ImportError as error: print("REFUSED", type(error).__module__, type(error).__name__, error)
else: print("IMPORTED", muster.jax.initialize.__name__)
"""
SUPPORTED = "muster.jax supports JAX and jaxlib 0.6.2 to 0.12.0"


@outer_releases
@pytest.mark.parametrize(
    ("before", "says"),
    [
        ("jax.__version_info__ = (0, 6, 1)", f"REFUSED muster.errors UnsupportedRelease JAX 0.6.1 is too old: {SUPPORTED}"),
        ("jaxlib.version.__version_info__ = (0, 5, 3)", f"REFUSED muster.errors UnsupportedRelease jaxlib 0.5.3 is too old: {SUPPORTED}"),
        ("sys.modules['jax._src.clusters'] = None", f"has no jax._src.clusters: {SUPPORTED}. A program joins its job without muster.jax if"),
        ("jax.__version_info__ = (0, 13, 1)", f"JAX 0.13.1 is not tested: {SUPPORTED}\nIMPORTED"),
        ("jax.__version_info__ = (0, 12, 7)", "\nIMPORTED"),
    ],
    ids=["old", "old-jaxlib", "private-name", "new", "patch"],
)
def test_a_release_of_jax_that_is_not_supported_is_named(scene, release, before, says):
    text = scene.python(release, IMPORT.format(before=before)).succeed()
    assert says in text and ("is not tested" in text) == ("is not tested" in says), text


EXPECT = """
def expect(kind, **arguments):
    import time
    began = time.monotonic()
    try:
        muster.jax.initialize(**arguments)
    except muster.MusterError as error:
        assert type(error).__name__ == kind, repr(error)
        print(kind, getattr(error, "tasks", ""), getattr(error, "code", ""), error, flush=True)
        print("took", time.monotonic() - began, flush=True)
    else:
        print("joined", flush=True)
"""


def test_a_service_that_is_not_there_is_an_error_and_not_the_end_of_the_process(scene, release):
    code = INITIALIZE + EXPECT + (
        "expect('ServiceUnreachable', service='127.0.0.1:1', num_processes=2, process_id=1, initialization_timeout=1)\n"
        "expect('ClusterEnvError')\n"
        "print('alive', jax.numpy.ones(3).sum())"
    )
    text = scene.python(release, code).succeed()
    assert "the service at 127.0.0.1:1 cannot be reached" in text and "muster serve" in text
    assert "process_id=" in text and "alive 3.0" in text


def test_missing_tasks_are_named_and_the_process_can_go_on_waiting(scene, release):
    server = scene.serve("--tasks", "3")
    code = INITIALIZE + EXPECT + (
        "expect('TasksMissing', service=sys.argv[1], num_processes=3, process_id=int(sys.argv[2]), initialization_timeout=float(sys.argv[3]))\n"
        "muster.jax.initialize(sys.argv[1], 3, int(sys.argv[2]), initialization_timeout=60)\n" + WORK
    )
    first = scene.python(release, code, server.grpc, "0", "3")
    first.line("TasksMissing")
    assert re.search(r"TasksMissing \((1, 2|1|2),? ?2?\)", first.text()), first.text()
    assert "have not registered" in first.text() and "muster status" in first.text()
    join = INITIALIZE + "muster.jax.initialize(sys.argv[1], 3, int(sys.argv[2]), initialization_timeout=60)\n" + WORK
    others = [scene.python(release, join, server.grpc, str(process)) for process in (1, 2)]
    assert sums([first, *others]) == [f"{process} 3 6 own service: False" for process in range(3)]


def test_a_process_that_gives_up_ends_with_a_trace_and_not_with_a_signal(scene, release):
    server = scene.serve("--tasks", "2")
    code = INITIALIZE + "muster.jax.initialize(sys.argv[1], 2, 1, initialization_timeout=1.5)\n"
    program = scene.python(release, code, server.grpc)
    assert program.end() == 1, program.text()
    assert "muster.errors.TasksMissing: 1 of 2 tasks have not registered" in program.text(), program.text()
    assert re.search(r"not registered at \S+: 0 \(", program.text()), program.text()
    server.until("its registration is withdrawn", lambda job: job.run.tasks[1].state == "missing")


def test_a_wrong_number_of_processes_is_refused_before_anything_is_registered(scene, release):
    server = scene.serve("--tasks", "2")
    code = INITIALIZE + EXPECT + (
        "expect('ClusterEnvError', service=sys.argv[1], num_processes=4, process_id=1)\n"
        "expect('ClusterEnvError', service=sys.argv[1], process_id=7)\n"
    )
    text = scene.python(release, code, server.grpc).succeed()
    assert "has 2 task(s), but this process was told that there are 4 processes" in text
    assert "none with the number 7" in text
    assert {task.state for task in server.client.tasks()} == {"missing"}


def test_an_excluded_process_is_told_why(scene, release):
    server = scene.serve("--tasks", "2", "--recoverable")
    server.client.exclude(1, reason="flaky network card")
    code = INITIALIZE + EXPECT + "expect('Refused', service=sys.argv[1], num_processes=2, process_id=1, initialization_timeout=30)\n"
    text = scene.python(release, code, server.grpc).succeed()
    assert "Refused" in text and "PERMISSION_DENIED" in text and "flaky network card" in text, text
    # A task of a run that goes on fails by its exclusion; whether that still holds, only REST can say.
    exclusion = server.client.exclusions()[0]
    server.client.readmit(exclusion, reason="replaced")
    join = INITIALIZE + "muster.jax.initialize(sys.argv[1], 2, int(sys.argv[2]), initialization_timeout=60, heartbeat_timeout_seconds=2)\nprint('joined', flush=True)\nimport time; time.sleep(1000)\n"
    programs = [scene.python(release, join, server.grpc, str(process)) for process in range(2)]
    for program in programs:
        program.line("joined")
    exclusion = server.client.exclude(1, reason="flaky again")
    programs[1].end()
    text = scene.python(release, code, server.grpc, MUSTER_SERVER=server.http).succeed()
    assert "Refused" in text and "flaky again" in text, text
    server.client.readmit(exclusion, reason="replaced again")
    scene.python(release, join, server.grpc, "1", MUSTER_SERVER=server.http).line("joined")


def test_ctrl_c_interrupts_the_wait_for_the_service_and_for_the_others(scene, release):
    server = scene.serve("--tasks", "2")
    code = INITIALIZE + (
        "print('begins', flush=True)\n"
        "try: muster.jax.initialize(sys.argv[1], 2, 1)\n"
        "except KeyboardInterrupt: print('interrupted', flush=True); sys.exit(7)\n"
    )
    for address, in_wait in (("127.0.0.1:1", None), (server.grpc, lambda job: job.run.tasks[1].state == "registering")):
        program = scene.python(release, code, address)
        program.line("begins")
        if in_wait:
            server.until("it registers", in_wait)
        else:
            time.sleep(0.5)
        program.process.send_signal(signal.SIGINT)
        program.line("^interrupted$")
        assert program.end() == 7, program.text()


def test_a_second_registration_of_this_process_is_refused(scene, release):
    server = scene.serve("--tasks", "1")
    code = INITIALIZE + (
        "muster.jax.initialize(sys.argv[1], 1, 0)\n"
        "for call in (lambda: muster.join(sys.argv[1], 1, 0), lambda: muster.jax.initialize(sys.argv[1], 1, 0)):\n"
        "    try: call()\n"
        "    except muster.MusterError as error: print('ERROR', error, flush=True)\n"
    ) + LEAVE
    text = scene.python(release, code, server.grpc, server.http).succeed()
    assert "by JAX's client" in text and "has joined a job already" in text, text


def test_it_is_too_late_after_the_first_computation(scene, release):
    code = "import muster.jax, jax\njax.devices()\ntry: muster.jax.initialize('a:1', 1, 0)\nexcept muster.MusterError as e: print(e)"
    assert "before anything else of JAX" in scene.python(release, code).succeed()


def test_a_killed_process_is_seen_and_a_restarted_one_joins_again(scene, release):
    server = scene.serve("--tasks", "2", "--recoverable")
    code = INITIALIZE + (
        "muster.jax.initialize(sys.argv[1], 2, int(sys.argv[2]))\n"
        "print('joined', flush=True)\n"
        "import time; time.sleep(1000)\n"
    )
    programs = [scene.python(release, code, server.grpc, str(process)) for process in range(2)]
    for program in programs:
        program.line("joined")
    programs[0].kill()
    server.until("the loss of task 0", lambda job: job.run.tasks[0].state == "failed")
    assert programs[1].process.poll() is None, "the other one goes on without process 0"
    again = scene.python(release, code, server.grpc, "0")
    again.line("joined")
    tasks = server.client.tasks()
    assert [task.state for task in tasks] == ["connected"] * 2 and tasks[0].unsynced


def test_certificates_of_jax_are_used(request, scene, tmp_path):
    release = "0.12.0"
    if not interpreter(release).exists():
        skip(request, f"JAX {release}", "run tests/jax/setup, then tests/python/setup")
    scene.start([TOOLS / "bin/muster", "tls", "new", tmp_path / "certs", "--name", "localhost"]).succeed()
    certs = tmp_path / "certs"
    server = scene.serve(
        "--tasks", "1", "--grpc-tls-cert", certs / "server.pem", "--grpc-tls-key", certs / "server-key.pem", "--grpc-tls-client-ca", certs / "ca.pem"
    )
    port = server.grpc.rpartition(":")[2]
    code = INITIALIZE + "muster.jax.initialize(sys.argv[1], 1, 0, initialization_timeout=30)\nprint('joined', jax.process_count())\n" + LEAVE
    variables = {
        "JAX_MTLS_CERT_FILE": str(certs / "client.pem"),
        "JAX_MTLS_KEY_FILE": str(certs / "client-key.pem"),
        "JAX_MTLS_CA_FILE": str(certs / "ca.pem"),
    }
    assert "joined 1" in scene.python(release, code, f"localhost:{port}", server.http, **variables).succeed()
    without = scene.python(release, code.replace("=30", "=2"), f"localhost:{port}")
    assert without.end() == 1 and "muster.errors.ServiceUnreachable" in without.text(), without.text()


def test_the_program_of_the_readme_runs(scene: Scene, release, tmp_path):
    readme = (ROOT / "python/README.md").read_text()
    [program] = re.findall(r"```python\n# train\.py\n(.*?)```", readme, re.DOTALL)
    (tmp_path / "train.py").write_text(program)
    launch = scene.start([TOOLS / "bin/muster", "launch", "-n", "2", "--", interpreter(release), tmp_path / "train.py"])
    text = launch.succeed()
    assert "[0] the sum over 2 processes is 3.0" in text, text


def test_the_notebook_of_the_readme_runs(scene, tmp_path):
    server = scene.serve("--tasks", "2", "--recoverable")
    readme = (ROOT / "python/README.md").read_text()
    [program] = re.findall(r"```python\n# look\.py\n(.*?)```", readme, re.DOTALL)
    join = "import muster, sys, time; muster.join(sys.argv[1], 2, int(sys.argv[2])); print('joined', flush=True); time.sleep(1000)"
    tasks = [scene.start([TOOLS / "bin/python", "-c", join, server.grpc, str(task)]) for task in range(2)]
    for task in tasks:
        task.line("joined")
    env = clean_environment(MUSTER_SERVER=server.http)
    done = subprocess.run([TOOLS / "bin/python", "-c", program], env=env, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0 and "excluded" in done.stdout, done


AUTO = INITIALIZE + """
muster.jax.initialize(initialization_timeout=60)
from jax._src import distributed
print("IS", os.environ["MUSTER_HOST_ID"], distributed.global_state.process_id, flush=True)
""" + WORK
DETECTED = "import muster.jax, os, jax\n" + GLOO + """
jax.distributed.initialize()
from jax._src import distributed
print("IS", os.environ["MUSTER_HOST_ID"], distributed.global_state.process_id, flush=True)
""" + WORK


def processes_of_hosts(scene, server, release: str, code: str, hosts: list[str]) -> dict[str, int]:
    """Starts a process on each "host" that does not know its process id; returns which process each was."""
    variables = {"JAX_COORDINATOR_ADDRESS": server.grpc, "MUSTER_PROCESS_ID": "auto"}
    programs = [scene.python(release, code, **variables, MUSTER_HOST_ID=host) for host in hosts]
    found = [re.findall(r"IS (\S+) (\d+)", program.succeed()) for program in programs]
    return {host: int(process) for [(host, process)] in found}


def test_a_host_keeps_its_process_id_over_runs(scene, release):
    server = scene.serve("--tasks", "2")
    assert processes_of_hosts(scene, server, release, AUTO, ["b", "a"]) == {"a": 0, "b": 1}
    # Host a is replaced by one whose name is sorted last; the other is told the same as before.
    assert processes_of_hosts(scene, server, release, AUTO, ["c", "b"]) == {"c": 0, "b": 1}
    hosts = server.client._get("/api/v1/jobs/default/task-owners")["owners"]
    assert [(host["task"], host["host"], host["run"]) for host in hosts] == [(0, "c", 2), (1, "b", 2)], hosts
    moved = server.client._get("/api/v1/jobs/default/devices/map")
    fates = {place["identity"]["host"]: place["fate"] for place in moved["places"]}
    assert fates == {"a": "gone", "b": "same", "c": "came"}, moved


def test_jax_itself_learns_the_process_id_of_its_host(scene):
    server = scene.serve("--tasks", "2")
    assert processes_of_hosts(scene, server, "0.10.2", DETECTED, ["b", "a"]) == {"a": 0, "b": 1}


# A program of JAX alone, but for what the first line imports. It ends when its identity is there.
PLAIN = """
import jax, os
""" + GLOO + """
jax.distributed.initialize()
from jax._src import distributed
state = distributed.global_state
state.client.blocking_key_value_get(f"muster/host/{state.process_id}", 60_000)
""" + WORK


def fates_of_hosts(server) -> dict[str, str]:
    """What has become of each "host" since the run before."""
    moved = server.client._get("/api/v1/jobs/default/devices/map")
    return {f"{place['identity']['host']} {place['identity']['local']}": place["fate"] for place in moved["places"]}


def test_jax_itself_publishes_the_identities_of_hosts(scene, release):
    server = scene.serve("--tasks", "2")
    variables = {"JAX_COORDINATOR_ADDRESS": server.grpc, "MUSTER_NUM_PROCESSES": "2"}
    for hosts in (["a", "b"], ["c", "b"]):
        programs = [
            scene.python(release, "import muster.jax" + PLAIN, **variables, MUSTER_PROCESS_ID=str(me), MUSTER_HOST_ID=host)
            for me, host in enumerate(hosts)
        ]
        for program in programs:
            program.succeed()
    assert fates_of_hosts(server) == {"a 0": "gone", "b 0": "same", "c 0": "came"}


def test_a_launch_publishes_the_identities_of_its_processes(scene, release):
    server = scene.serve("--tasks", "2")
    launch = [TOOLS / "bin/muster", "launch", "-n", "2", "--server", server.http, "--", interpreter(release), "-c", PLAIN]
    for host in ("a", "b"):
        scene.start(launch, MUSTER_HOST_ID=host).succeed()
    assert fates_of_hosts(server) == {"a 0": "gone", "a 1": "gone", "b 0": "came", "b 1": "came"}


def test_a_process_without_an_id_says_what_it_waits_for(scene):
    server = scene.serve("--tasks", "2")
    code = "import muster\ntry: muster.join(process_id='auto', timeout=1)\nexcept muster.Deadline as error: print('LATE', error, flush=True)"
    text = scene.python("0.10.2", code, JAX_COORDINATOR_ADDRESS=server.grpc, MUSTER_HOST_ID="a").succeed()
    assert "LATE a has no task id after 1s: this host is new to the job, and 1 of 2 processes are present" in text, text
