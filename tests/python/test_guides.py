"""The guides of `web/guide`: each program runs as its page says, with the commands and the output of the page."""

from __future__ import annotations

import os
from pathlib import Path
import re
import shlex
import signal

from conftest import ROOT, TOOLS, Program, Scene, interpreter, outer_releases
from test_elastic import children


class Guide:
    """A page of the guide, whose program is in a folder."""

    def __init__(self, scene: Scene, name: str, release: str, folder: Path) -> None:
        self.scene, self.release, self.folder = scene, release, folder
        self.text = (ROOT / f"web/guide/{name}.md").read_text()
        [(program, self.file)] = re.findall(r"```python\n(# (\w+\.py)\n.*?)```", self.text, re.DOTALL)
        (folder / self.file).write_text(program)
        lines = [line for block in re.findall(r"```sh\n(.*?)```", self.text, re.DOTALL) for line in block.splitlines()]
        self.commands = [line for line in lines if line.strip()]
        self.output = [line for block in re.findall(r"```text\n(.*?)```", self.text, re.DOTALL) for line in block.splitlines()]
        assert self.output, f"{name} does not show what its program writes"

    def edit(self, before: str, after: str) -> None:
        """Changes the program. The tests add pauses by this, and lines that tell how far it is."""
        program = (self.folder / self.file).read_text()
        assert program.count(before) == 1, f"{self.file} has {before!r} {program.count(before)} times"
        (self.folder / self.file).write_text(program.replace(before, after))

    def start(self, begins: str, server: str = "", **variables: str) -> Program:
        """Starts the command of the page that begins with these words, with the server at this address."""
        [command] = [line for line in self.commands if line.startswith(begins)]
        words = shlex.split(command.replace("http://127.0.0.1:8477", server), comments=True)
        replaced = {"muster": TOOLS / "bin/muster", "python3": interpreter(self.release)}
        program = self.scene.start([replaced.get(word, word) for word in words], cwd=self.folder, **variables)
        return program

    def check_output(self, text: str) -> None:
        missing = [line for line in self.output if line not in text.splitlines()]
        assert not missing, f"the page shows {missing}, and the program wrote\n{text}"


def kill_one(launch: Program, how: signal.Signals) -> None:
    """Sends a signal to one of the processes of a launch."""
    os.kill(children(launch.process.pid)[-1], how)


def test_every_guide_has_its_test():
    names = {path.stem for path in (ROOT / "web/guide").glob("*.md") if re.search(r"```python\n# \w+\.py\n", path.read_text())}
    assert names == {"arrays", "data", "live", "preemption", "resharding", "platforms"}


@outer_releases
def test_arrays_span_processes(scene, release, tmp_path):
    guide = Guide(scene, "arrays", release, tmp_path)
    guide.check_output(guide.start("muster launch").succeed())


@outer_releases
def test_the_data_of_a_step_does_not_depend_on_the_number_of_processes(scene, release, tmp_path):
    guide = Guide(scene, "data", release, tmp_path)
    guide.start("python3 -c").succeed()
    texts = [guide.start(f"muster launch -n {count}").succeed() for count in (2, 4)]
    two, four = [set(re.findall(r"step (\d+): .* sum is (\d+)", text)) for text in texts]
    # One sum for each step, in all processes of both launches.
    assert len(two) == 6 and len({step for step, _ in two}) == 6, texts[0]
    assert four == {(step, sum_of_step) for step, sum_of_step in two if int(step) >= 3}, texts
    guide.check_output("\n".join(texts))


@outer_releases
def test_killed_processes_come_back_to_the_live_devices(scene, release, tmp_path):
    guide = Guide(scene, "live", release, tmp_path)
    # It says where it is, and is slow enough to be killed in the middle, and for the killed one to come back.
    pause = "    import time; time.sleep(0.02 if len(devices) == 4 else 1)\n    print('AT', number, len(devices), flush=True)\n"
    guide.edit("    return train(weights, x, y)", f"{pause}    return train(weights, x, y)")
    launch = guide.start("muster launch")
    launch.next(r"AT 20 4")
    kill_one(launch, signal.SIGKILL)
    [task] = launch.next(r"task (\d) failed \(SIGKILL\)").groups()
    launch.next(rf"\[{task}\] process {task} continues at step [1-9]\d* with processes \[0, 1, 2, 3\]")
    # All are killed at once, after a checkpoint: the next launch goes on from there.
    while int(launch.next(r"AT (\d+) 4")[1]) < 60:
        pass
    launch.kill()
    launch = guide.start("muster launch")
    saved = int(launch.line(r"process 0 starts with the weights of step (\d+)$")[1])
    assert saved >= 50
    text = launch.succeed()
    guide.check_output(text)
    assert min(int(step) for step in re.findall(r"AT (\d+)", text)) == saved, text


@outer_releases
def test_a_drain_and_a_signal_make_all_save_at_one_step(scene, release, tmp_path):
    guide = Guide(scene, "preemption", release, tmp_path)
    serve = guide.commands[0].split()
    assert serve[:2] == ["muster", "serve"]
    server = scene.serve(*serve[2:])

    def launch() -> Program:
        return guide.start("muster launch", server.http)

    def leave(program: Program) -> int:
        steps = re.findall(r"has saved and leaves after step (\d+)", program.succeed())
        assert len(steps) == 4 and len(set(steps)) == 1, program.text()
        return int(steps[0])

    program = launch()
    program.line("process 0 starts at step 0$")
    server.until("all tasks run", lambda job: job.run.state == "running")
    guide.start("muster drain", MUSTER_SERVER=server.http).succeed()
    first = leave(program)

    program = launch()
    program.line(f"process 3 starts at step {first + 1}$")
    program.line("process 0 starts at step")
    server.until("all tasks run", lambda job: job.run.state == "running")
    kill_one(program, signal.SIGTERM)
    second = leave(program)
    assert second > first

    program = launch()
    program.line(f"process 3 starts at step {second + 1}$")
    guide.check_output(program.succeed())


@outer_releases
def test_an_array_moves_to_other_processes(scene, release, tmp_path):
    guide = Guide(scene, "resharding", release, tmp_path)
    guide.check_output(guide.start("muster launch").succeed())


@outer_releases
def test_devices_are_as_the_guide_of_platforms_says(scene, release, tmp_path):
    guide = Guide(scene, "platforms", release, tmp_path)
    text = guide.start("muster launch").succeed()
    if release != "0.6.2":
        return guide.check_output(text)
    assert "process 1: cpu 131072, memory unpinned_host of unpinned_host" in text, text
    assert "process 0: the sum over 2 processes is 3" in text, text
