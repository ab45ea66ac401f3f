"""Balance of two stages by parameters and by time, where time and parameters are in different layers: predicted and measured.

    python benchmarks/pipeline_balance.py

The model is a chain of layers over rows of tokens. One is heavy: an attention with few parameters that takes as long as many
others, so that it can be compensated. The cut by time rests on the time of each layer by itself. The prediction is the
simulated schedule with the time of each stage for a micro-batch, measured by the same step without communication, so that both
processes compute all the time: cores that share caches and memory then take longer than a layer by itself, which is timed while
the other process may be tracing.
"""

import argparse
import json
import statistics
import sys
from typing import Any

import numpy as np
from pipelined import RESULT, Pipelined, Problem, results_of

LAYERS, WIDTH, TOKENS, ROWS = 30, 256, 512, 4
CUTS = ("balanced(by=parameters)", "balanced(by=time)")


def uneven() -> Any:
    """Returns a chain whose second layer is heavy."""
    import keras

    layers = keras.layers
    x = inputs = keras.Input((TOKENS, WIDTH))
    for number in range(LAYERS):
        inner = layers.Dense(WIDTH, activation="relu", name=f"dense{number}")(x)
        x = layers.Add(name=f"add{number}")([x, inner])
        if number == 1:
            heavy = layers.MultiHeadAttention(16, WIDTH // 16, name="heavy")(x, x)
            x = layers.Add(name="after_heavy")([x, heavy])
    return keras.Model(inputs, x)


def rank_program(given: argparse.Namespace) -> None:
    """Measures in one of the processes; the first one prints results."""
    import tfdist
    from tfdist.pipelining.cutting import cut_model, trace_model
    from tfdist.pipelining.operation_timing import measure_seconds
    from tfdist.pipelining.schedule_catalog import make_schedule
    from tfdist.pipelining.timeline import simulate

    strategy = tfdist.load_strategy("pipeline", intra_op_threads=1, pipeline_schedule="1f1b", micro_batches=1)
    with strategy.process_device():
        traced = trace_model(uneven())
        everyone = strategy.group.gather("seconds", measure_seconds(traced.graph, rows=ROWS), 300)
    seconds = list(np.mean(everyone, axis=0))
    x = np.zeros((given.micro_batches * ROWS, TOKENS, WIDTH), "float32")
    sides, alone, layers = {}, {}, {}
    for cut in CUTS:
        stages = cut_model(traced, cut, 2, seconds=lambda graph: seconds).stages
        index = {id(call): i for i, call in enumerate(traced.graph.calls)}
        layers[cut] = [sum(float(seconds[index[id(call)]]) for call in stage.calls) for stage in stages]
        after = [stage.calls[-1].layer.name for stage in stages[:-1]]  # the same layers in all its trainers

        def problem(_: int, after: list[str] = after) -> Problem:
            return Problem(uneven, (x, x), ",".join(after))

        sides[cut] = Pipelined(strategy, "1f1b", given.micro_batches, problem)
        alone[cut] = Pipelined(strategy, "1f1b", given.micro_batches, problem, communicates=False)
    steps: dict[str, list[float]] = {cut: [] for cut in CUTS}
    own: dict[str, list[list[float]]] = {cut: [] for cut in CUTS}
    for _ in range(given.rounds):
        for cut in CUTS:
            steps[cut].append(max(sides[cut].seconds()))
            own[cut].append([seconds / given.micro_batches for seconds in alone[cut].seconds()])
    for cut in CUTS:
        times = [statistics.median(each) for each in zip(*own[cut], strict=True)]
        forward, backward = [t / 3 for t in times], [2 * t / 3 for t in times]
        schedule = make_schedule("1f1b", 2, given.micro_batches)
        found = {
            "cut": cut,
            "layers": layers[cut],
            "stages": times,
            "predicted": simulate(schedule, forward=forward, backward=backward).makespan,
            "measured": statistics.median(steps[cut]),
        }
        if strategy.is_chief:
            print(RESULT + json.dumps(found), flush=True)
    strategy.group.barrier("end")
    strategy.close()


def main() -> None:
    """Starts the processes; prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launcher", choices=("tensorflow", "horovod"), default="tensorflow")
    parser.add_argument("--micro_batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        rank_program(given)
        return
    options = ["--rank", f"--micro_batches={given.micro_batches}", f"--rounds={given.rounds}"]
    print(
        "| cut | layers by themselves (ms) | stages (ms) | predicted step (ms) | measured step (ms) | measured / predicted |"
        "\n| --- | --- | --- | --- | --- | --- |"
    )
    for row in results_of([sys.executable, __file__, *options], 2, given.launcher, 8):
        layers, stages = (" + ".join(f"{1e3 * s:.0f}" for s in row[name]) for name in ("layers", "stages"))
        times = f"{1e3 * row['predicted']:.0f} | {1e3 * row['measured']:.0f}"
        print(f"| `{row['cut']}` | {layers} | {stages} | {times} | {row['measured'] / row['predicted']:.2f} |")


if __name__ == "__main__":
    main()
