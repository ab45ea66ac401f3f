"""Tables and pictures of what `sync_learning.py` has trained.

    python benchmarks/sync_report.py runs/sync_learning.jsonl --pictures=runs

Prints a Markdown table for each task, with means over seeds, and writes a picture of each to the directory: the metric over
time, over the bytes that a rank has sent, and, at the end, over the period.
"""

import argparse
import json
import math
import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Run = dict[str, Any]
Points = list[tuple[float, float]]

HEAD = ("method", "metric", "difference", "standard error", "within", "MB sent", "seconds", "times as fast")
SHOWN = (
    "every_step",
    "local_sgd(period=16)",
    "post_local_sgd(",
    "diloco(period=50",
    "hierarchical",
    "easgd",
    "fedavg",
)
STEP = "step"  # the method of a line with the time of a step
NEAR = {"accuracy": 2.5, "loss": 0.5}  # largest difference from every step in the picture by period, in points or nats
CLIENTS = "fedavg"  # a step is a round of many steps of clients, whose time is not computed
_SUMMED = ("none", "fp16", "bf16", "powersgd")  # all others gather codes


def sent_bytes(run: Run) -> Points:
    """Returns (step, bytes that a rank has sent by then), at each record."""
    ranks = run["replicas"]
    times = 2 * (ranks - 1) / ranks if run["compression"].startswith(_SUMMED) else ranks - 1
    payloads = [(step, payload) for step, payload in run["payload_bytes"]]
    total, last, points = 0.0, 0, []
    for step, payload in payloads:
        total += (step - last) * payload * times
        last = step
        points.append((step, total))
    return points


def seconds(run: Run, step_ms: float, megabits: float) -> Points:
    """Returns (step, seconds until then) at each record, over a link of this rate."""
    combine = max if run["overlaps"] else lambda *terms: math.fsum(terms)
    return [(step, combine(step * step_ms / 1e3, sent * 8 / (megabits * 1e6))) for step, sent in sent_bytes(run)]


class Results:
    """The trainings of one task."""

    def __init__(self, lines: Sequence[Run], megabits: float):
        """Selects the trainings and the time of a step."""
        self.step_ms = next(line["ms"] for line in lines if line["method"] == STEP)
        self.megabits = megabits
        self.by_method: dict[str, list[Run]] = {}
        for line in sorted(lines, key=lambda line: line["seed"]):
            if line["method"] != STEP:
                self.by_method.setdefault(line["method"], []).append(line)
        self.first = next(iter(self.by_method))
        plain = self.by_method[self.first][0]
        self.metric, self.margin = plain["metric"], plain["margin"]
        self.scale = 100.0 if self.metric == "accuracy" else 1.0
        self.title = f"{plain['data']}, {plain['steps']} steps, {plain['replicas']} replicas"

    def finals(self, method: str) -> dict[int, float]:
        """Returns the last value of the metric by seed; NaN where the loss was not finite."""
        return {
            run["seed"]: self.scale * run[self.metric][-1][1] if self.metric in run else math.nan
            for run in self.by_method[method]
        }

    def differences(self, method: str) -> list[float]:
        """Returns what a method is better by than the first, by pairs of the same seed."""
        sign = 1 if self.metric == "accuracy" else -1
        plain, own = self.finals(self.first), self.finals(method)
        return [sign * (own[seed] - plain[seed]) for seed in sorted(own.keys() & plain.keys())]

    def end(self, method: str, measure: Callable[[Run], Points]) -> float:
        """Returns the last value of a measure, as the mean over seeds."""
        ends = [measure(run)[-1][1] for run in self.by_method[method] if run.get("payload_bytes")]
        return statistics.mean(ends) if ends else math.nan

    def seconds(self, run: Run) -> Points:
        """Returns the seconds by step."""
        return seconds(run, self.step_ms, self.megabits)

    def curve(self, method: str, measure: Callable[[Run], Points]) -> Points:
        """Returns the mean of the metric over seeds, by the mean of a measure, at each evaluation."""
        runs = [run for run in self.by_method[method] if run.get("payload_bytes") and self.metric in run]
        if not runs:
            return []
        at = [dict(measure(run)) for run in runs]
        values = [dict(map(tuple, run[self.metric])) for run in runs]
        steps = [step for step in values[0] if all(step in found for found in at)]
        mean = lambda maps, step: statistics.mean(one[step] for one in maps)  # noqa: E731
        return [(mean(at, step), self.scale * mean(values, step)) for step in steps]


def row(results: Results, method: str) -> list[str]:
    """Returns the cells of a method."""
    found, finals = results.differences(method), results.finals(method).values()
    if any(map(math.isnan, finals)):
        return [f"`{method}`", "not finite", "", "", "no", "", "", ""]
    mean = statistics.mean(found) if found else math.nan
    error = statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else math.nan
    holds = mean >= -(results.margin + 2 * (0.0 if math.isnan(error) else error))
    sent, took = results.end(method, sent_bytes) / 1e6, results.end(method, results.seconds)
    plain = results.end(results.first, results.seconds)
    digits = 2 if results.metric == "accuracy" else 4
    timed = results.by_method[method][0]["family"] != CLIENTS
    return [
        f"`{method}`",
        f"{statistics.mean(finals):.{digits}f}",
        f"{mean:+.{digits}f}",
        "" if math.isnan(error) else f"{error:.{digits}f}",
        "yes" if holds else "no",
        f"{sent:.4g}",
        f"{took:.1f}" if timed else "",
        f"{plain / took:.3g}" if timed else "",
    ]


def table(results: Results) -> str:
    """Returns the table; a positive difference is an improvement."""
    head = [results.metric if name == "metric" else name for name in HEAD]
    cells = [head, ["---"] * len(HEAD), *(row(results, method) for method in results.by_method)]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def draw(results: Results) -> Figure:
    """Returns the figure: the metric over time, over bytes, and over the period."""
    figure = Figure(figsize=(15, 4.6), dpi=100, layout="constrained")
    by_time, by_bytes, by_period = figure.subplots(1, 3)
    for axes in (by_time, by_bytes):
        axes.set_prop_cycle(color=colormaps["tab20"].colors[::2] + colormaps["tab20"].colors[1::2])
    for method in results.by_method:
        if method.removeprefix("--sync=").startswith(SHOWN):
            timed = results.by_method[method][0]["family"] != CLIENTS
            by_time.plot(
                *_columns(results.curve(method, results.seconds) if timed else []), label=method.removeprefix("--sync=")
            )
            by_bytes.plot(*_columns([(x / 1e6, y) for x, y in results.curve(method, sent_bytes)]))
    for family in ("local_sgd", "diloco"):
        points = [(run["period"], values) for run, values in _by_period(results, family)]
        if points:
            means = [(period, statistics.mean(values)) for period, values in points]
            by_period.errorbar(*_columns(means), _spreads(points), marker="o", markersize=4, label=family)
            by_period.set_xticks([period for period, _ in points])
    plain = statistics.mean(results.finals(results.first).values())
    by_period.axhline(plain, color="#888888", linestyle="--", label="every_step")
    # What has diverged is in the table; here it would hide all other differences.
    near = NEAR[results.metric]
    by_period.set_ylim(max(plain - near, by_period.get_ylim()[0]), min(plain + near, by_period.get_ylim()[1]))
    labels = ("seconds, computed", "MB that a rank has sent", "period, steps")
    for axes, label in zip((by_time, by_bytes, by_period), labels, strict=True):
        _finish(axes, label, "accuracy, %" if results.metric == "accuracy" else "loss, nats")
    figure.suptitle(f"{results.title}, {results.megabits:g} Mbit/s")
    figure.legend(*by_time.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    by_period.legend(frameon=False)
    return figure


def _by_period(results: Results, family: str) -> list[tuple[Run, list[float]]]:
    """The uncompressed runs of a family, by period."""
    chosen = [(runs[0], list(results.finals(method).values())) for method, runs in results.by_method.items()]
    chosen = [
        pair
        for pair in chosen
        if pair[0]["family"] == family and not pair[0]["overlaps"] and pair[0]["compression"] == "none"
    ]
    return sorted(chosen, key=lambda pair: pair[0]["period"])


def _spreads(points: list[tuple[int, list[float]]]) -> list[float]:
    return [statistics.stdev(values) if len(values) > 1 else 0.0 for _, values in points]


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _finish(axes: Axes, label: str, metric: str) -> None:
    axes.set_xscale("log", subs=[2, 5])
    for ticks in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
        ticks("{x:g}")
    axes.set_xlabel(label)
    axes.set_ylabel(metric)
    axes.grid(color="#e6e6e6")


def main() -> None:
    """Prints the tables and writes the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("raw", type=pathlib.Path, help="file of sync_learning.py")
    parser.add_argument(
        "--pictures", type=pathlib.Path, default=pathlib.Path("runs"), help="directory for the pictures"
    )
    parser.add_argument("--megabits", type=float, default=100.0, help="rate of the link of each rank, in Mbit/s")
    given = parser.parse_args()
    lines = [json.loads(line) for line in given.raw.read_text(encoding="utf-8").splitlines()]
    given.pictures.mkdir(parents=True, exist_ok=True)
    for task in dict.fromkeys(line["task"] for line in lines if line.get("method", STEP) != STEP):
        results = Results([line for line in lines if line.get("task") == task], given.megabits)
        print(
            f"\n{task}: {results.title}, {results.step_ms:.1f} ms per step, {given.megabits:g} Mbit/s\n\n{table(results)}"
        )
        draw(results).savefig(given.pictures / f"sync_{task}.png")


if __name__ == "__main__":
    main()
