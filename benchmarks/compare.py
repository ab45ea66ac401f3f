"""Paired comparisons of step times: sides take turns, so that a drift of the machine's speed meets all of them.

    python benchmarks/compare.py --workload=mlp "tfdist --strategy=horovod" horovod "horovod --compression=fp16"

Each side is a name and its flags; the first is held against every other. Prints a Markdown table, a row for each of the
others, and writes every single time to a file of JSON lines. `slow_link.sh` in front of it makes the network slow.
"""

import argparse
import dataclasses
import json
import math
import pathlib
import signal
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import machine
import starting
from paired import ratio_of_medians
from stopwatch import Stopwatch
from workload import WORKLOADS

HEAD = ("workload", "link", "side", "against", "ms a step", "theirs", "ratio of times (95%)", "times as fast (95%)")
Write = Callable[[dict[str, Any]], object]


@dataclasses.dataclass
class Entrant:
    """A side in a comparison.

    Attributes:
      side: how to run it.
      calls: how many calls of a run count.
      times: of each pair, the run's median milliseconds a step.
      failure: the end of the output of a run that failed; the side then takes no further part.
    """

    side: starting.Side
    calls: int = 1
    times: list[float] = dataclasses.field(default_factory=list)
    failure: str = ""


def compare(given: argparse.Namespace, write: Write) -> list[Entrant]:
    """Runs one round that does not count, from which each side's number of calls follows; then the pairs."""
    entrants = [Entrant(starting.Side.parse(text)) for text in given.sides]
    for entrant in entrants:
        entrant.calls = _calls(_run(entrant, -1, given, write), given)
    for pair in range(given.pairs):
        # Every other round is run backwards, so that nobody always follows the same side.
        for entrant in entrants[:: 1 if pair % 2 else -1]:
            if not entrant.failure:
                entrant.times.append(_run(entrant, pair, given, write))
    return entrants


def _run(entrant: Entrant, pair: int, given: argparse.Namespace, write: Write) -> float:
    entry = {"workload": given.workload, "link": machine.link(), "side": entrant.side.text, "pair": pair}
    began = time.monotonic()
    try:
        run = entrant.side.run(given.workload, Stopwatch(given.wait, given.warmup, entrant.calls), given.deadline)
    except starting.SideFailed as error:
        entrant.failure = str(error)
        write({**entry, "failure": entrant.failure})
        return math.nan
    took = round(time.monotonic() - began, 1)
    write({**entry, "wait": given.wait, "run_seconds": took, "ms": run.ms, "loss": run.loss})
    return statistics.median(run.ms)


def _calls(ms: float, given: argparse.Namespace) -> int:
    """How many calls fill the time that a run is given; at least two steps."""
    steps = min(given.seconds * 1e3 / ms, given.steps) if math.isfinite(ms) else 0
    return max(round(steps / given.wait), math.ceil(2 / given.wait))


def row(workload: str, ours: Entrant, theirs: Entrant) -> list[str]:
    """A row of the table."""
    cells = [workload, machine.link(), f"`{ours.side.text}`", f"`{theirs.side.text}`"]
    if ours.failure or theirs.failure:
        return [*cells, *("failed" if entrant.failure else "" for entrant in (ours, theirs)), "", ""]
    ratio = ratio_of_medians(ours.times, theirs.times)
    medians = [f"{statistics.median(entrant.times):.1f}" for entrant in (ours, theirs)]
    return [*cells, *medians, str(ratio), str(ratio.inverse())]


def main(given: argparse.Namespace) -> int:
    """Compares; returns 1 if a side failed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the sides are ended too
    path = pathlib.Path(given.raw or time.strftime("runs/benchmark-%Y%m%d-%H%M%S.jsonl"))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", buffering=1, encoding="utf-8") as raw:
        raw.write(json.dumps(machine.description(starting.PEERS)) + "\n")
        ours, *others = compare(given, lambda entry: raw.write(json.dumps(entry) + "\n"))
    for cells in (HEAD, ["---"] * len(HEAD), *(row(given.workload, ours, theirs) for theirs in others)):
        print(f"| {' | '.join(cells)} |")
    print(f"\n{given.pairs} pairs, a wait each {given.wait} steps; raw times: {path}", flush=True)
    failed = [entrant for entrant in (ours, *others) if entrant.failure]
    for entrant in failed:
        print(f"\n{entrant.side.text} failed:\n{entrant.failure}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sides", nargs="+", metavar="SIDE", help="two or more, as in the README")
    parser.add_argument("--workload", choices=WORKLOADS, default="mlp")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--wait", type=int, default=10, help="steps between two waits for the loss, on every side")
    parser.add_argument("--warmup", type=int, default=3, help="steps of a run that do not count, at least")
    parser.add_argument("--seconds", type=float, default=3, help="what is measured in a run, about")
    parser.add_argument("--steps", type=int, default=80, help="that count in a run, at most; tfdist's epochs have 100")
    parser.add_argument("--deadline", type=float, default=240, help="seconds after which a run has failed")
    parser.add_argument("--raw", help="file of JSON lines to append to; runs/benchmark-TIME.jsonl by default")
    sys.exit(main(parser.parse_args()))
