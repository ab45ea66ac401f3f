"""Formats records as lines of plain text, for log files, pipes, and terminals without cursor control."""

import contextlib
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import monotonic
from typing import TextIO

from tfdist.coordination import Json
from tfdist.errors import byte_size
from tfdist.reporting.reporter import Reporter, RunPlan
from tfdist.reporting.schema import TRAIN, as_float, main_metrics

_MIN_SPEED_RATIO, _MIN_WAIT_FRACTION = 1.25, 0.1  # from which a worker is shown
_WIDTH = 76  # of 80, because a launcher adds the rank


def banner(description: Mapping[str, str]) -> list[str]:
    """Returns texts by name as lines of at most 76 columns, unless a word is longer; empty texts are omitted."""
    rows = {name: text for name, text in description.items() if text}
    indent = max(map(len, rows), default=0) + 2
    lines = []
    for name, text in rows.items():
        lines += textwrap.wrap(
            printable(text),
            _WIDTH,
            initial_indent=name.ljust(indent),
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines


class PlainReporter(Reporter):
    """Writes the description of the run and a line for each record and for the outcome, without control characters.

    The stream is flushed after each line, but not closed.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = monotonic):
        self._stream, self._clock = stream, clock
        self._plan: RunPlan | None = None

    def start(self, plan: RunPlan) -> None:
        self._plan = plan
        for text in banner(plan.description):
            self._write(text)

    @contextlib.contextmanager
    def busy(self, task: str) -> Iterator[None]:
        start_time = self._clock()
        yield
        self._write(f"{printable(task)} took {self._clock() - start_time:.1f} s")

    def record(self, record: Mapping[str, Json]) -> None:
        self._write(line(record, self._plan))

    def close(self, outcome: str) -> None:
        if outcome:
            self._write(f"run ended: {printable(outcome)}")

    def _write(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()


def line(record: Mapping[str, Json], plan: RunPlan | None = None) -> str:
    """Formats a record as one line, such as `step 20/500  epoch 1/20  train  loss 0.3100  accuracy 0.9100`.

    Its fields may be missing. `plan` adds the epoch and the total number of steps, and communication if it is shown.
    """
    return printable("  ".join(_parts(record, plan)))


def _parts(record: Mapping[str, Json], plan: RunPlan | None) -> Iterator[str]:
    if "step" in record:
        yield f"step {record['step']}/{plan.total_steps}" if plan else f"step {record['step']}"
        if plan and (epoch := plan.epoch_text(int(record["step"]))):
            yield epoch
    yield str(record.get("kind", TRAIN))
    yield from loss_and_metrics(record)
    for name, unit in (("examples_per_second", "examples/s"), ("step_seconds", "s/step")):
        value = as_float(record.get(name))
        if value is not None:
            yield f"{format_number(value)} {unit}"
    if plan and plan.shows_communication:
        yield from communication(record)
    yield from workers(record)


def communication(record: Mapping[str, Json]) -> Iterator[str]:
    """Yields the size and the time of a step's communication, such as `sent 1.2 MiB (25.6x less)` and `comm 12%`."""
    payload, ratio = as_float(record.get("payload_bytes")), as_float(record.get("compression_ratio"))
    if payload is not None:
        ratio_text = f" ({ratio:.3g}x less)" if ratio is not None and ratio > 1.005 else ""
        yield f"sent {byte_size(payload)}{ratio_text}"
    exposed, step_seconds = (as_float(record.get(k)) for k in ("exposed_communication_seconds", "step_seconds"))
    if exposed is not None and step_seconds:
        yield f"comm {100 * min(1.0, exposed / step_seconds):.0f}%"


def workers(record: Mapping[str, Json], is_long: bool = True) -> Iterator[str]:
    """Yields the staleness, the slowest worker if speeds differ much, and the worker that waits longest if it waits much.

    For example, `staleness 1.92`, `rank 1 5.1 of 20.4 updates/s` (only if long) and `rank 0 waits 31% for workers`.
    """
    rates = [worker["updates_per_second"] for worker in record.get("workers", ())]
    if not rates:
        return
    if (staleness := as_float(record.get("staleness"))) is not None:
        yield f"staleness {staleness:.2f}"
    if is_long and max(rates) > _MIN_SPEED_RATIO * min(rates):
        yield f"rank {rates.index(min(rates))} {min(rates):.1f} of {sum(rates):.1f} updates/s"
    wait_fractions = []
    for rank, worker in enumerate(record["workers"]):
        total = worker["compute_seconds"] + sum(worker["wait_seconds"].values())
        wait_fractions += [(seconds / total, cause, rank) for cause, seconds in worker["wait_seconds"].items() if total]
    if wait_fractions and max(wait_fractions)[0] > _MIN_WAIT_FRACTION:
        fraction, cause, rank = max(wait_fractions)
        yield f"rank {rank} waits {100 * fraction:.0f}%{f' for {cause}' if is_long else ''}"


def loss_and_metrics(record: Mapping[str, Json], max_metrics: int | None = None) -> Iterator[str]:
    """Yields `name value` for the loss and up to `max_metrics` metrics (all if None), in the order of the record."""
    loss = [("loss", record["loss"])] if "loss" in record else []
    for name, value in (*loss, *list(main_metrics(record).items())[:max_metrics]):
        parsed_value = as_float(value)
        yield f"{name} {value if parsed_value is None else format_number(parsed_value)}"


def format_number(value: float) -> str:
    """Formats a number with about four significant digits: `0.3100`, `12.50`, `5100`, `2.1e-05`, `nan`."""
    magnitude = abs(value)
    if not math.isfinite(value) or magnitude >= 1e7 or 0 < magnitude < 1e-3:
        return f"{value:.3g}"
    if magnitude >= 1000:
        return f"{value:.0f}"
    return f"{value:.4f}" if magnitude < 10 else f"{value:.2f}"


def text_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns rows as lines with aligned columns."""
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def printable(text: str) -> str:
    """Replaces control characters by spaces."""
    return "".join(character if character.isprintable() else " " for character in text)
