"""Trains a small network on all processes of a job together: an ordinary multi-process JAX program.

    export JAX_COORDINATOR_ADDRESS=HOST:8476          # where Muster listens
    export JAX_COORDINATOR_BIND_ADDRESS=127.0.0.1:0   # keeps JAX's own service out of the way
    MUSTER_NUM_PROCESSES=2 MUSTER_PROCESS_ID=0 python train.py &
    MUSTER_NUM_PROCESSES=2 MUSTER_PROCESS_ID=1 python train.py

Nothing in it knows about Muster: each process holds a part of the data, the gradients are averaged by XLA over gloo, and
the loss falls. When a drain is asked for (or one process gets SIGTERM), all processes stop at the same step and save.
"""

import argparse
import os
import time

import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

POINTS_PER_PROCESS = 512
HIDDEN = 64
LEARNING_RATE = 0.003


def two_spirals(points: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Points on two interleaved spirals, and which spiral each is on: no straight line comes near to telling them apart."""
    random = np.random.default_rng(seed)
    turn = np.sqrt(random.uniform(0.02, 1.0, points)) * 3 * np.pi
    label = random.integers(0, 2, points)
    angle = turn + label * np.pi
    position = np.stack([np.cos(angle), np.sin(angle)], axis=1) * turn[:, None] / (3 * np.pi)
    return (position + random.normal(0, 0.01, (points, 2))).astype(np.float32), label.astype(np.float32)


def new_model(key: jax.Array) -> dict[str, jax.Array]:
    keys = jax.random.split(key, 3)
    sizes = [(2, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 1)]
    model = {}
    for i, (key, (inputs, outputs)) in enumerate(zip(keys, sizes)):
        # The first layer starts wide: the spirals turn more often than inputs within [-1, 1] can follow at the usual scale.
        scale = 4.0 if i == 0 else np.sqrt(2 / inputs)
        model[f"w{i}"] = jax.random.normal(key, (inputs, outputs)) * scale
        model[f"b{i}"] = jnp.zeros(outputs)
    return model


def loss_of(model: dict[str, jax.Array], position: jax.Array, label: jax.Array) -> jax.Array:
    hidden = jnp.tanh(position @ model["w0"] + model["b0"])
    hidden = jnp.tanh(hidden @ model["w1"] + model["b1"])
    logit = (hidden @ model["w2"] + model["b2"])[:, 0]
    # Cross-entropy, in the form that cannot overflow. The mean runs over all processes' points.
    return jnp.mean(jnp.maximum(logit, 0) - logit * label + jnp.log1p(jnp.exp(-jnp.abs(logit))))


def train_step(state, position, label):
    """One step of Adam on the whole of the data."""
    model, mean, square, step = state
    loss, gradient = jax.value_and_grad(loss_of)(model, position, label)
    step = step + 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, gradient)
    square = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * g * g, square, gradient)

    def move(parameter, mean, square):
        return parameter - LEARNING_RATE * (mean / (1 - 0.9**step)) / (jnp.sqrt(square / (1 - 0.999**step)) + 1e-8)

    model = jax.tree.map(move, model, mean, square)
    return (model, mean, square, step), loss


def save(model: dict[str, jax.Array], path: str) -> None:
    """Writes a checkpoint whole or not at all."""
    with open(f"{path}.partial", "wb") as file:
        np.savez(file, **{name: np.asarray(value) for name, value in model.items()})
    os.replace(f"{path}.partial", path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--step-ms", type=int, default=0, help="sleep after each step, to watch a job for longer")
    parser.add_argument("--save", metavar="FILE", help="where to save the model at the end, or when asked to stop")
    args = parser.parse_args()

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    began = time.monotonic()
    jax.distributed.initialize(
        num_processes=int(os.environ["MUSTER_NUM_PROCESSES"]), process_id=int(os.environ["MUSTER_PROCESS_ID"])
    )

    def say(text: str) -> None:
        # The end of line in the same write, so that processes that share a terminal do not mix their lines.
        print(f"[process {jax.process_index()}] {text}\n", end="", flush=True)

    say(f"joined {jax.process_count()} processes with {jax.device_count()} devices in {time.monotonic() - began:.2f} s")

    mesh = Mesh(np.array(jax.devices()), ("data",))
    split = NamedSharding(mesh, PartitionSpec("data"))
    whole = NamedSharding(mesh, PartitionSpec())

    # Each process makes its own part of the data, as a real one would read its own files.
    mine = two_spirals(POINTS_PER_PROCESS, seed=jax.process_index())
    position, label = (jax.make_array_from_process_local_data(split, part) for part in mine)

    def new_state(key):
        model = new_model(key)
        zeros = jax.tree.map(jnp.zeros_like, model)
        return model, zeros, zeros, 0

    state = jax.jit(new_state, out_shardings=whole)(jax.random.key(0))
    step_all = jax.jit(train_step, donate_argnums=0, out_shardings=whole)

    first = None
    for step in range(1, args.steps + 1):
        state, loss = step_all(state, position, label)
        if step == 1:
            first = float(loss)
        if jax.process_index() == 0 and (step == 1 or step % 50 == 0):
            say(f"step {step:4}  loss {float(loss):.4f}")
        if multihost_utils.reached_preemption_sync_point(step):
            say(f"asked to stop: all processes stop at step {step}")
            break
        time.sleep(args.step_ms / 1000)

    last = float(loss)
    if args.save and jax.process_index() == 0:  # every process holds the same model
        save(state[0], args.save)
        say(f"saved the model of step {step} to {args.save}")
    jax.distributed.shutdown()
    if step == args.steps and last > first / 5:
        raise SystemExit(f"the loss went only from {first:.4f} to {last:.4f}")
    say(f"done: the loss went from {first:.4f} to {last:.4f} in {step} steps and {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    main()
