"""Step times of `--sync` over a slow link, compared with every step, computation alone, and PyTorch's local SGD, as a table.

    benchmarks/slow_link.sh 100mbit python benchmarks/sync_speed.py --pairs=7 --minutes=8

Exchanges are rare, so a time is the mean over whole periods, each of which is one call. The sides take turns as in
`compare.py`; a row has the median of a side's runs, and ratios of medians with 95% intervals. `floor + link` is the time of
computation alone plus that of the bytes that a step sends on average, at the rate of the link, as if neither overlapped the
other. The bytes are counted at the loopback interface, which all ranks share.

Runs are appended to a file of JSON lines, and those that it already has are not repeated: the same command continues after
`--minutes`, or after an interruption.
"""

import argparse
import dataclasses
import json
import math
import pathlib
import re
import signal
import statistics
import sys
import time
from typing import Any

import machine
import starting
from paired import ratio_of_medians
from stopwatch import Stopwatch

OURS = "tfdist --strategy=horovod --communication=gloo"
DILOCO = 'diloco(period=50, outer="sgd(momentum=0.9, nesterov=True, learning_rate=0.7)"'


@dataclasses.dataclass(frozen=True)
class Row:
    """A side of the table.

    Attributes:
      side: as in `compare.py`.
      period: steps of a call; whole periods of the side.
      warm: calls that do not count. An exchange that overlaps the next period needs a second one.
      calls: calls of a run that count.
    """

    side: str
    period: int
    warm: int = 1
    calls: int = 2


# In each table, the first row is every step, the second computation alone, and the last ones are PyTorch.
TABLES = {
    2: (
        Row(f"{OURS} --sync=every_step", 2),
        Row("floor", 50),
        # Never exchanges: computation alone, as the floor, but with tfdist's data pipeline and checks.
        Row(f"{OURS} '--sync=local_sgd(period=1000000)'", 50),
        Row(f"{OURS} '--sync=local_sgd(period=16)'", 16),
        Row(f"{OURS} '--sync=local_sgd(period=16)' --compression=int8", 16),
        Row(f"{OURS} '--sync={DILOCO}, fragments=4, overlap=True)' --compression=int8", 50, warm=2, calls=3),
        Row(f"{OURS} '--sync={DILOCO}, fragments=4, overlap=True)' '--compression=int8(bits=4)'", 50, warm=2, calls=3),
        Row(f"{OURS} '--sync={DILOCO})' --compression=int8", 50),
        Row(f"{OURS} --sync=every_step '--compression=powersgd(rank=4)'", 50),
        Row("post_local_sgd --period=16", 16),
        Row("post_local_sgd --period=16 --wrap=none", 16),
    ),
    4: (
        Row(f"{OURS} --ranks=4 --sync=every_step", 1),
        Row("floor --ranks=4", 50),
        Row(f"{OURS} --ranks=4 '--sync=hierarchical_local_sgd(periods=(4, 16))'", 16, calls=1),
        Row("post_local_sgd --averager=hierarchical --inner_period=4 --period=16 --ranks=4", 16, calls=1),
        Row("post_local_sgd --averager=hierarchical --inner_period=4 --period=16 --ranks=4 --wrap=none", 16, calls=1),
    ),
}
HEAD = ("side", "ms per step", "MB per step", "floor + link, ms", "time / (floor + link)", "time / floor")
HEAD += ("times as fast as every step", "time / PyTorch's")


class Results:
    """The runs of a file, of one link, by side and pair."""

    def __init__(self, path: pathlib.Path):
        """Reads what there is."""
        self._path = path
        self._runs: dict[tuple[str, int], dict[str, Any]] = {}
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            self._keep(json.loads(line))

    def write(self, entry: dict[str, Any]) -> None:
        """Appends a line."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        self._keep(entry)

    def has(self, row: Row, pair: int) -> bool:
        """Whether a run was measured."""
        return (row.side, pair) in self._runs

    def of(self, row: Row, field: str) -> dict[int, float]:
        """A value of each run of a side, by pair."""
        return {pair: run[field] for (side, pair), run in sorted(self._runs.items()) if side == row.side}

    def _keep(self, entry: dict[str, Any]) -> None:
        if entry.get("link") == machine.link() and "mean_ms" in entry:
            self._runs[entry["side"], entry["pair"]] = entry


def measure(row: Row, pair: int, deadline: float, results: Results) -> str:
    """Runs a side once; returns the end of its output if it failed."""
    entry = {"link": machine.link(), "side": row.side, "pair": pair, "steps": row.calls * row.period}
    began = time.monotonic()
    try:
        watch = Stopwatch(wait=row.period, warmup=row.warm * row.period, calls=row.calls)
        run = starting.Side.parse(row.side).run("mlp", watch, deadline)
    except starting.SideFailed as error:
        results.write({**entry, "failure": str(error)})
        return str(error)
    took = round(time.monotonic() - began, 1)
    # Every call has the same number of steps, so the mean of their times is that of the steps.
    results.write({**entry, "run_seconds": took, "mean_ms": statistics.mean(run.ms), **dataclasses.asdict(run)})
    return ""


def measure_all(given: argparse.Namespace, results: Results) -> tuple[int, dict[str, str]]:
    """Measures what is missing; returns how many runs are missing still, and the failures by side."""
    began, failures, missing = time.monotonic(), dict[str, str](), 0
    for pair in range(given.pairs):
        for ranks in given.ranks:
            # Every other round is run backwards, so that nobody always follows the same side.
            for row in chosen(ranks, given.sides)[:: 1 if pair % 2 else -1]:
                if results.has(row, pair):
                    continue
                if row.side in failures or time.monotonic() - began > given.minutes * 60:
                    missing += 1
                elif failure := measure(row, pair, given.deadline, results):
                    failures[row.side] = failure
    return missing + len(failures), failures


def chosen(ranks: int, sides: str) -> tuple[Row, ...]:
    """The rows of a table that match a regular expression, after the first two."""
    return tuple(row for number, row in enumerate(TABLES[ranks]) if number < 2 or re.search(sides, row.side))


def table(rows: tuple[Row, ...], results: Results) -> list[list[str]]:
    """The cells of a table, without those for which there are no runs yet."""
    every_step, floor = rows[:2]
    theirs = [row for row in rows if row.side.startswith("post_local_sgd") and results.of(row, "mean_ms")]
    fastest = min(theirs, key=lambda row: statistics.median(results.of(row, "mean_ms").values()), default=None)
    lines = []
    for row in rows:
        times, sent = results.of(row, "mean_ms"), results.of(row, "link_bytes")
        if not times:
            continue
        megabytes = statistics.median(sent.values()) / 1e6
        link_ms = megabytes * 8e3 / link_megabits()
        floors = {pair: ms + link_ms for pair, ms in results.of(floor, "mean_ms").items()}
        alone = f"{statistics.median(floors.values()):.1f}" if floors and math.isfinite(link_ms) else ""
        lines.append(
            [
                f"`{row.side.replace(OURS, 'tfdist')}`",
                f"{statistics.median(times.values()):.1f}",
                f"{megabytes:.3g}",
                alone,
                ratio(times, floors) if alone else "",
                ratio(times, results.of(floor, "mean_ms")),
                ratio(results.of(every_step, "mean_ms"), times),
                ratio(times, results.of(fastest, "mean_ms")) if fastest else "",
            ]
        )
    return lines


def ratio(ours: dict[int, float], theirs: dict[int, float]) -> str:
    """The ratio of medians of the pairs that both have."""
    pairs = sorted(ours.keys() & theirs.keys())
    return str(ratio_of_medians([ours[p] for p in pairs], [theirs[p] for p in pairs])) if pairs else ""


def link_megabits() -> float:
    """The rate of the link in Mbit/s, as given to `slow_link.sh`; NaN at full speed."""
    found = re.fullmatch(r"(\d+)(mbit|gbit)", machine.link())
    return int(found[1]) * {"mbit": 1, "gbit": 1000}[found[2]] if found else math.nan


def main(given: argparse.Namespace) -> int:
    """Measures and prints the tables; returns 1 if a side failed, 3 if runs are missing because time was up."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the sides are ended too
    given.raw.parent.mkdir(parents=True, exist_ok=True)
    results = Results(given.raw)
    results.write(machine.description(starting.PEERS))
    missing, failures = measure_all(given, results)
    for ranks in given.ranks:
        print(f"\n{ranks} ranks, {machine.link()}, {given.pairs} pairs:\n")
        for cells in (HEAD, ["---"] * len(HEAD), *table(chosen(ranks, given.sides), results)):
            print(f"| {' | '.join(cells)} |")
    print(f"\nRaw times: {given.raw}")
    for side, failure in failures.items():
        print(f"\n{side} failed:\n{failure}", file=sys.stderr)
    if missing:
        print(f"{missing} runs are missing: run the command again to continue.", file=sys.stderr)
    return 1 if failures else 3 if missing else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--ranks", type=int, nargs="+", choices=TABLES, default=list(TABLES), help="tables to measure")
    parser.add_argument("--sides", default="", help="regular expression: only these rows, and every step and the floor")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no run starts after so many")
    parser.add_argument("--deadline", type=float, default=240, help="seconds after which a run has failed")
    parser.add_argument("--raw", type=pathlib.Path, default=pathlib.Path(f"runs/sync_speed-{machine.link()}.jsonl"))
    sys.exit(main(parser.parse_args()))
