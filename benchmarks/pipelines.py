"""Pipelines: the time of a step over the ideal, by schedule and number of micro-batches; and the time of a message by size.

    python benchmarks/pipelines.py                                   # two stages of a transformer, beside PyTorch's
    python benchmarks/pipelines.py --what=waits                      # four stages that wait instead of computing
    python benchmarks/pipelines.py --what=messages --launcher=horovod

A stage takes t for the forward and backward pass of a micro-batch, while the other processes compute as well: t is that of
the slowest, measured in the same processes by the same step without communication. The ideal step of M micro-batches in S
stages takes (M + S - 1) t. Cores that share caches and memory compute faster while others wait, so that a step can be
faster than this. For two stages there is therefore a second bound, (M - 1) t + 2 u, where u is the time of a stage while the
other process is idle. For PyTorch (`pipelines_torch.py`), t and u are measured likewise.

    python benchmarks/pipelines.py --launcher=tensorflow,horovod --torch --rounds=7

is the comparison of both engines with PyTorch: for each number of micro-batches, the sides run one right after the other. It
takes an idle machine, one core a process, and a stage of 250 ms or more, as with the rows of `blocks.py`.
"""

import argparse
import json
import re
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import starting
from blocks import BLOCKS, HEADS, ROWS, TOKENS, WIDTH, arrays
from pipelined import RESULT, Pipelined, Problem, equal_cut, results_of

TORCH = starting.HERE / "pipelines_torch.py"
ALONE = 4  # micro-batches of a step without communication
FORWARD, BACKWARD = 0.1, 0.2  # seconds that a stage of --what=waits waits
WEIGHTS = 0.1  # of BACKWARD, for the gradients of the weights, if the schedule computes them by themselves
KIB = 1024


def transformer() -> Any:
    """Returns a model of equal blocks."""
    import keras

    layers = keras.layers
    x = inputs = keras.Input((TOKENS, WIDTH))
    for number in range(BLOCKS):
        normal = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(normal, normal)])
        normal = layers.LayerNormalization()(x)
        inner = layers.Dense(4 * WIDTH, activation="relu")(normal)
        x = layers.Add(name=f"block{number}")([x, layers.Dense(WIDTH)(inner)])
    return keras.Model(inputs, x)


def waiting(parts: int, stages: int, of_weights: float) -> Any:
    """Returns a model whose parts wait as long as a stage, divided by the number of parts per stage.

    Args:
      parts: number of parts.
      stages: number of stages.
      of_weights: seconds that the gradients of a stage's weights take, after those of its input.
    """
    import keras
    import tensorflow as tf

    share = stages / parts

    def wait(x: tf.Tensor, seconds: float) -> tf.Tensor:
        def sleep(value: Any) -> Any:
            time.sleep(seconds)
            return value

        return tf.ensure_shape(tf.numpy_function(sleep, [x], x.dtype), x.shape)

    @tf.custom_gradient
    def waited(x: tf.Tensor, weight: tf.Tensor) -> Any:
        def backward(gradient: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            of_input = wait(gradient, (BACKWARD - of_weights) * share)
            return of_input, tf.reduce_sum(wait(of_input, of_weights * share) if of_weights else of_input)

        return wait(x, FORWARD * share), backward

    class Wait(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.weight = self.add_weight(shape=(), name="weight")

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return waited(x, tf.convert_to_tensor(self.weight))

        def compute_output_spec(self, x: Any) -> Any:
            return keras.KerasTensor(x.shape, x.dtype)

    x = inputs = keras.Input((8,))
    for number in range(parts):
        x = keras.layers.Dense(8)(x)
        x = Wait(name=f"block{number}")(x)
    return keras.Model(inputs, x)


def problem_of(what: str, micro_batches: int, processes: int, schedule: str = "gpipe") -> Any:
    """Returns what is trained, for a number of stages."""
    of_weights = WEIGHTS if schedule == "zb_h1" else 0.0

    def waits(stages: int) -> Problem:
        x = np.zeros((micro_batches, 8), "float32")
        return Problem(lambda: waiting(stages, processes, of_weights), (x, x), equal_cut(stages, stages))

    def computes(stages: int) -> Problem:
        return Problem(transformer, arrays(micro_batches), equal_cut(BLOCKS, stages))

    return waits if what == "waits" else computes


def rank_of_schedules(strategy: Any, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measures all schedules with all numbers of micro-batches, in turn."""
    processes = strategy.grid.stages
    problem = problem_of(given.what, ALONE, processes)
    together = Pipelined(strategy, "gpipe", ALONE, problem, communicates=False)
    singles = []
    if given.what == "transformer":
        most = _almost_one_stage(problem(processes))
        singles.append(Pipelined(strategy, "gpipe", ALONE, lambda stages: most, communicates=False))
    for micro_batches in given.micro_batches:
        sides = {
            name: Pipelined(strategy, name, micro_batches, problem_of(given.what, micro_batches, processes, name))
            for name in given.schedules
        }
        own: dict[str, list[float]] = {"together": [], "alone": []}
        steps: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(given.rounds):
            own["together"].append(max(together.seconds()) / ALONE)
            for single in singles:
                own["alone"].append(max(single.seconds()) / ALONE * BLOCKS / 2 / (BLOCKS - 1))
            for name, side in sides.items():
                steps[name].append(max(side.seconds()))
        yield {"micro_batches": micro_batches, **own, "steps": steps}


def _almost_one_stage(problem: Problem) -> Problem:
    """Returns a problem whose first stage has all blocks but one, so that it computes alone most of the time."""
    return problem._replace(cut=f"block{BLOCKS - 2}")


def rank_of_messages(strategy: Any, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measures messages that two processes send to each other in turn, 20 in a call."""
    import tensorflow as tf

    rank, pipeline, trips = strategy.pipeline_rank, strategy.pipeline_collectives, 10
    here, there = ("there", "back") if rank == 0 else ("back", "there")

    def ping_pong(x: tf.Tensor) -> tf.Tensor:
        for trip in range(trips):
            if rank == 0:
                pipeline.send([x], 1, tag=f"{here}{x.shape[0]}/{trip}")
            with tf.control_dependencies([x]):
                [y] = pipeline.receive([tf.TensorSpec(x.shape, x.dtype)], 1 - rank, tag=f"{there}{x.shape[0]}/{trip}")
            x = y + 1
            if rank == 1:
                pipeline.send([x], 0, tag=f"{here}{x.shape[0]}/{trip}")
        return x[:1]

    for kib in given.kib:
        call = tf.function(ping_pong, autograph=False)
        value, found = tf.zeros([kib * KIB // 4]), []
        with strategy.process_device():
            for _ in range(given.rounds + 2):
                began = time.perf_counter()
                call(value).numpy()
                found.append((time.perf_counter() - began) / (2 * trips))
        yield {"kib": kib, "seconds": statistics.median(found[2:])}


def rank_program(given: argparse.Namespace) -> None:
    """Measures in one of the processes; the first one prints results."""
    import tfdist

    measure = rank_of_messages if given.what == "messages" else rank_of_schedules
    strategy = tfdist.load_strategy("pipeline", intra_op_threads=1, pipeline_schedule="gpipe", micro_batches=1)
    for found in measure(strategy, given):
        if strategy.is_chief:
            print(RESULT + json.dumps(found), flush=True)
    strategy.group.barrier("end")
    strategy.close()


def table(sides: dict[str, list[dict[str, Any]]], stages: int) -> str:
    """Returns the steps of all sides as a Markdown table."""
    head = ["library", "schedule", "M", "t (ms)", "u (ms)", "step (ms)", "/ ideal", "/ second bound", "/ gpipe"]
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for library, rows in sides.items():
        for row in rows:
            t, u = (statistics.median(row[name] or [float("nan")]) for name in ("together", "alone"))
            m, first = row["micro_batches"], statistics.median(row["steps"].get("gpipe", [float("nan")]))
            for name, seconds in row["steps"].items():
                # With zb_h1, a third of it is left if the parts of a pass take equally long.
                divisor = int(re.findall(r"\d+", name)[-1]) if "interleaved" in name else 3 if name == "zb_h1" else 1
                step, bubble = statistics.median(seconds), (stages - 1) / divisor
                second = (m - bubble) * t + 2 * bubble * u
                times = f"{1e3 * t:.0f} | {1e3 * u:.0f} | {1e3 * step:.0f} | {step / (m + bubble) / t:.3f}"
                lines.append(f"| {library} | {name} | {m} | {times} | {step / second:.3f} | {step / first:.3f} |")
    return "\n".join(lines)


def _launchers(text: str) -> list[str]:
    found = text.split(",")
    if not {*found} <= {"tensorflow", "horovod"}:
        raise argparse.ArgumentTypeError(f"must be tensorflow, horovod or both. Received: {text}.")
    return found


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Runs the processes of each side; prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=("transformer", "waits", "messages"), default="transformer")
    parser.add_argument(
        "--launcher", type=_launchers, default=["tensorflow"], help="tensorflow, horovod, or both with a comma"
    )
    parser.add_argument("--schedules", type=lambda text: text.split(","), default=["gpipe", "1f1b"])
    parser.add_argument("--micro_batches", type=_numbers, default=[2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=3, help="steps of each schedule, in turn")
    parser.add_argument("--kib", type=_numbers, default=[64, 256, 1024, 4096, 8192], help="sizes of messages")
    parser.add_argument("--minutes", type=float, default=8, help="after which a side has failed")
    parser.add_argument("--torch", action="store_true", help="also PyTorch's schedules over Gloo, in .venv-peers")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        rank_program(given)
        return
    processes = 4 if given.what == "waits" else 2
    options = [f"--schedules={','.join(given.schedules)}", f"--rounds={given.rounds}", f"--what={given.what}", "--rank"]
    options += [f"--kib={','.join(map(str, given.kib))}"]
    ours, peers = [sys.executable, __file__, *options], [str(starting.PEERS), str(TORCH), *options]
    if given.what == "messages":
        for launcher in given.launcher:
            for row in results_of(ours, processes, launcher, given.minutes):
                print(f"{launcher}: {row['kib']} KiB: {1e3 * row['seconds']:.2f} ms")
        return
    sides = {f"tfdist, {launcher}": (ours, launcher) for launcher in given.launcher}
    if given.torch:
        sides["PyTorch"] = (peers, "tensorflow")
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for micro_batches in given.micro_batches:
        for side, (command, launcher) in sides.items():
            one = [*command, f"--micro_batches={micro_batches}"]
            found[side] += results_of(one, processes, launcher, given.minutes)
    print(table(found, processes))
    if given.what == "transformer":
        print(f"\nA message has {ROWS * TOKENS * WIDTH * 4 / KIB:.0f} KiB.")


if __name__ == "__main__":
    main()
