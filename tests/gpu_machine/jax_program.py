"""A JAX program of two processes that sums over both: `jax_program.py VARIANT RANK FOLDER [again]`, started by `start_process`. As
`steps` it runs 50 steps and ends. As another variant, process 1 stops calling after five steps, and process 0 says what becomes of
its pending step once process 1 is killed:

    with   steps inside `with live_devices`, as JAX documents it; process 1 is started again and joins
    once   one step, one call of get_live_nodes, then plain steps
    bare   as `once`, without XLA_FLAGS: communicators block, and nothing runs asynchronously
    none   no call of get_live_nodes: XLA puts no incarnations into the key of the clique
"""

import os
import re
import sys
import time

from processes import TWO_RANKS_ON_ONE_GPU, limit_life, list_loaded, log, put_file, report, start, wait_for_file, with_new_nccl

XLA_FLAGS = ("--xla_gpu_nccl_terminate_on_error=false --xla_gpu_nccl_async_execution=true "
             "--xla_gpu_nccl_blocking_communicators=false")
SILENT_STEP = 5  # process 1 does not call it


def start_process(variant, rank, folder, service, again=""):
    """Starts one of the processes; returns it and the path of its log."""
    env = {**TWO_RANKS_ON_ONE_GPU, "XLA_PYTHON_CLIENT_MEM_FRACTION": ".2", "JAX_COORDINATOR_ADDRESS": service.address,
           "JAX_COORDINATOR_BIND_ADDRESS": "127.0.0.1:0", "NCCL_PROFILER_PLUGIN": os.environ["PLUGIN"], "NCCL_DEBUG": "INFO",
           "NCCL_DEBUG_SUBSYS": "INIT,PROFILE", "NCCL_RAS_ADDR": "localhost:28028", "TF_CPP_MIN_LOG_LEVEL": "0",
           "XLA_FLAGS": None}
    if variant != "steps":
        env |= {"TF_CPP_VMODULE": "nccl_communicator=1,gpu_cliques=1,gpu_clique=1,hang_watchdog=1",
                "XLA_PYTHON_CLIENT_ABORT_COLLECTIVES_ON_FAILURE": "1", "XLA_FLAGS": None if variant == "bare" else XLA_FLAGS}
    command, more = with_new_nccl([sys.executable, os.path.abspath(__file__), variant, str(rank), folder, again])
    log_file = os.path.join(folder, f"process{rank}{again}.log")
    return start(command, log_file, env | more), log_file


class Program:
    def __init__(self, variant, rank, folder, again):
        import jax

        self.jax, self.variant, self.rank, self.folder, self.suffix = jax, variant, rank, folder, f"{rank}{again}"
        if variant != "steps":
            jax.config.update("jax_enable_recoverability", True)
        jax.distributed.initialize(num_processes=2, process_id=rank, initialization_timeout=40)
        self.devices = jax.devices()
        log("devices:", self.devices, "jax", jax.__version__)

    def report(self, *words):
        report(f"[{self.variant}, process {self.suffix}]", *words)

    def path(self, name):
        return os.path.join(self.folder, name)

    def put(self, name):
        put_file(self.path(name + self.suffix))

    def make_step(self, devices):
        """Returns a function that starts a sum over the devices; each process adds its rank plus one."""
        import numpy

        jax = self.jax
        size, parts = 1 << 16, jax.sharding.PartitionSpec("d")
        mesh = jax.sharding.Mesh(numpy.array(list(devices)), ("d",))
        mine = numpy.full((1, size), self.rank + 1.0, numpy.float32)
        rows = jax.make_array_from_callback((len(devices), size), jax.sharding.NamedSharding(mesh, parts), lambda _: mine)
        psum = jax.jit(jax.shard_map(lambda row: jax.lax.psum(row, "d"), mesh=mesh, in_specs=parts, out_specs=jax.sharding.PartitionSpec()))
        return lambda: psum(rows)

    def sum(self, devices):
        return float(self.make_step(devices)().addressable_shards[0].data[0, 0])

    def since_kill(self):
        try:
            return time.time() - os.path.getmtime(self.path("killed"))
        except OSError:
            return -1.0

    def run_steps(self):
        began = time.time()
        value = self.sum(self.devices)
        self.report(f"first sum {value} in {time.time() - began:.1f} s; {list_loaded('muster_nccl_profiler') or 'no plug-in'}")
        step = self.make_step(self.devices)
        for _ in range(50):
            step().block_until_ready()
        self.put("steps")
        wait_for_file(self.path("end"), 25)
        self.jax.distributed.shutdown()

    def run_until_killed(self, devices):
        """Runs steps, of which process 1 does not call the last; raises what the pending one raises."""
        step = self.make_step(devices)
        for number in range(SILENT_STEP + 1):
            if number == SILENT_STEP:
                self.put("silent")
                if self.rank == 1:
                    time.sleep(60)
            try:
                step().block_until_ready()
            except Exception as error:
                self.report(f"step {number} of {SILENT_STEP} ended {self.since_kill():.2f} s after the kill: {brief(error)}")
                self.put("ended")
                raise
        self.report(f"the pending step ENDED WITHOUT AN ERROR {self.since_kill():.2f} s after the kill")
        self.put("ended")

    def live_devices(self):
        from jax._src.distributed import global_state
        from jax.experimental.multihost_utils import _live_devices

        return list(_live_devices(global_state.client, self.devices))

    def run_with_live_devices(self, again):
        from jax.experimental.multihost_utils import live_devices

        if not again:
            try:
                with live_devices(self.devices) as live:
                    self.run_until_killed(live)
            except Exception as error:
                self.report(f"the block raised {self.since_kill():.2f} s after the kill: {brief(error)}")
        limit, was_alone = time.time() + 22, False
        while time.time() < limit:
            try:
                with live_devices(self.devices) as live:
                    if len(live) == 2 or not was_alone:
                        self.report(f"over {len(live)} live device(s): sum {self.sum(live)}")
                if len(live) == 2:
                    break
                if not was_alone:
                    was_alone = True
                    self.put("alone")
            except Exception as error:
                self.report("over live devices:", brief(error))
                if was_alone or again:
                    break
            time.sleep(0.2)

    def run_plain(self):
        if self.variant != "none":
            log("sum without incarnations:", self.sum(self.devices))
            log("live:", self.live_devices())
        try:
            self.run_until_killed(self.devices)
        except Exception as error:
            log(repr(error)[:3000])
        try:
            live = self.live_devices()
            self.report(f"over {len(live)} live device(s): sum {self.sum(live)}")
        except Exception as error:
            self.report("over live devices:", brief(error))


def brief(error):
    return f"{type(error).__name__}: " + re.sub(r"\s+", " ", str(error))[:120]


def main(variant, rank, folder, again):
    limit_life(60)
    program = Program(variant, int(rank), folder, again)
    if variant == "steps":
        program.run_steps()
    else:
        if variant == "with":
            program.run_with_live_devices(again)
        else:
            program.run_plain()
        program.put("finished")
        wait_for_file(program.path("end"), 20)
    log("done")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
