"""Uneven ranks: step times with rows allocated evenly and by measured speed, where one of two ranks has half of a core.

    python benchmarks/uneven.py                  # needs root, and a host whose cpu cgroup is writable
    python benchmarks/uneven.py --rows=64 --strategy=horovod --share=0.33

Rank 1 is slowed down by a CPU quota with a period of 10 ms, far shorter than a step. Fixed allocations give each rank's line,
seconds = fixed + per_row * rows, by least squares. The ideal is the least time of the slower rank on these lines. "Beside" is
what the sum of the gradients and the update take, whatever the allocation.
"""

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from workload import LEARNING_RATE, WORKLOADS, arrays

PERIOD = 10_000  # microseconds
SLOW = 1
CALL = 5  # steps
STEPS = {"weights": 60, "equal": 60, "measured": 200}
COUNTED = 9  # the last calls of a run
RESULT = "RESULT "
LAUNCHERS = {"multiworker": "tensorflow", "horovod": "horovod"}


class Run(NamedTuple):
    """What a run measured: medians of the last calls.

    Attributes:
      step: milliseconds per step.
      ranks: milliseconds that each rank needed for its own input and gradients.
      counts: rows of each rank.
    """

    step: float
    ranks: list[float]
    counts: list[int]


def rank_program(balance: str, strategy_name: str, batch_size: int, group: str) -> None:
    """Trains on one rank; the chief prints the result."""
    import keras

    import tfdist

    strategy = tfdist.load_strategy(strategy_name)
    if strategy.cluster.rank == SLOW:
        pathlib.Path(group, "cgroup.procs").write_text(str(os.getpid()))
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = tfdist.models.build(WORKLOADS["cnn"].model, WORKLOADS["cnn"].shape, WORKLOADS["cnn"].classes)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        trainer = tfdist.Trainer(model, optimizer=keras.optimizers.SGD(LEARNING_RATE), loss=loss, balance=balance)
    schedule = tfdist.Schedule(log_every=CALL, steps_per_call=CALL)
    checks = tfdist.Checks(measure_every=0)
    steps = STEPS[balance.partition("(")[0]]
    history = trainer.fit(
        arrays("cnn", 10 * batch_size), batch_size=batch_size, steps=steps, schedule=schedule, checks=checks, verbose=0
    )
    records = [record for record in history.records if record["kind"] == "train"][-COUNTED:]
    if strategy.is_chief:
        least, most = ([r[f"step_seconds_{name}"] for r in records] for name in ("min", "max"))
        slowest = [r["slowest_rank"] for r in records]
        ranks = [[b if s == rank else a for a, b, s in zip(least, most, slowest, strict=True)] for rank in (0, 1)]
        speeds = trainer.train_state.speeds
        found = {
            "step": 1e3 * statistics.median(r["step_seconds"] for r in records),
            "ranks": [1e3 * statistics.median(times) for times in ranks],
            "counts": speeds.counts if speeds else [],
        }
        print(RESULT + json.dumps(found), flush=True)
    strategy.group.leave()
    strategy.close()


@contextlib.contextmanager
def quota(share: float) -> Iterator[str]:
    """Yields the directory of a new cgroup that has this share of one core."""
    root = pathlib.Path("/sys/fs/cgroup")
    is_v2 = (root / "cgroup.controllers").exists()
    group = (root if is_v2 else root / "cpu") / f"tfdist-uneven-{os.getpid()}"
    try:
        group.mkdir()
        if is_v2:
            (group / "cpu.max").write_text(f"{int(share * PERIOD)} {PERIOD}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD))
            (group / "cpu.cfs_quota_us").write_text(str(int(share * PERIOD)))
    except OSError as error:
        raise SystemExit(f"A CPU quota needs root and a writable cgroup. Received: {error}.") from error
    try:
        yield str(group)
    finally:
        group.rmdir()


def run(balance: str, given: argparse.Namespace, group: str) -> Run:
    """Starts two ranks, and returns what the chief measured."""
    with tempfile.TemporaryDirectory() as logs:
        launch = [sys.executable, "-m", "tfdist.launch", "--processes=2", f"--log_dir={logs}"]
        launch += [f"--launcher={LAUNCHERS[given.strategy]}", "--", sys.executable, __file__]
        options = [f"--balance={balance}", f"--group={group}", f"--strategy={given.strategy}", f"--rows={given.rows}"]
        ended = subprocess.run(
            [*launch, *options], capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL
        )
    lines = [line.partition(RESULT)[2] for line in ended.stdout.splitlines() if RESULT in line]
    if not lines:
        raise SystemExit((ended.stdout + ended.stderr)[-2000:])
    return Run(**json.loads(lines[0]))


def ideal(runs: dict[int, Run], batch_size: int) -> tuple[list[tuple[float, float]], float, int]:
    """Returns the line of each rank, and the least time of the slower one, with the rows of rank 0.

    Args:
      runs: runs with fixed allocations, by the rows of rank 0.
      batch_size: rows of both ranks.
    """
    lines = []
    for rank in (0, 1):
        rows = [count if rank == 0 else batch_size - count for count in runs]
        per_row, fixed = np.polyfit(rows, [found.ranks[rank] for found in runs.values()], 1)
        lines.append((float(fixed), float(per_row)))
    (a, b), (c, d) = lines
    times = {n: max(a + b * n, c + d * (batch_size - n)) for n in range(1, batch_size)}
    best = min(times, key=lambda n: times[n])
    return lines, times[best], best


def table(sides: Sequence[tuple[str, Run]], least: float, other: float) -> str:
    """Returns the sides as a Markdown table, compared with the ideal alone, and with the ideal and other work."""
    head = ["`--balance`", "rows", "rank 0 alone", "rank 1 alone", "step", "/ ideal", "/ (ideal + other work)"]
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for name, found in sides:
        counts = " + ".join(map(str, found.counts))
        times = f"{found.ranks[0]:.1f} ms | {found.ranks[1]:.1f} ms | {found.step:.1f} ms | {found.step / least:.2f}"
        lines.append(f"| {name} | {counts} | {times} | {found.step / (least + other):.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Runs the fixed allocations, then both sides; prints the lines and a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=sorted(LAUNCHERS), default="multiworker")
    parser.add_argument("--rows", type=int, default=96, help="rows of one rank in an even allocation")
    parser.add_argument("--share", type=float, default=0.5, help="share of a core that rank 1 has")
    parser.add_argument("--balance", default="", help=argparse.SUPPRESS)  # of a rank
    parser.add_argument("--group", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    batch_size = 2 * given.rows
    if given.balance:
        rank_program(given.balance, given.strategy, batch_size, given.group)
        return
    with quota(given.share) as group:
        fixed = [round(batch_size * part) for part in (0.5, 0.625, 0.75)]
        runs = {n: run(f"weights({n},{batch_size - n})", given, group) for n in fixed}
        lines, least, best = ideal(runs, batch_size)
        for rank, (a, b) in enumerate(lines):
            print(f"rank {rank}: {a:.1f} ms + {b:.2f} ms per row")
        other = statistics.median(found.step - max(found.ranks) for found in runs.values())
        print(f"ideal: {best} + {batch_size - best} rows, {least:.1f} ms; other: {other:.1f} ms\n", flush=True)
        equal = run("equal", given, group)._replace(counts=[given.rows, given.rows])
        print(table([("equal", equal), ("measured", run("measured", given, group))], least, other))


if __name__ == "__main__":
    main()
