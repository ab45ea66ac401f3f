"""How every side is timed: the same number of steps between two waits for the loss, whoever trains."""

import argparse
import dataclasses
import json
import math
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

RESULT = "RESULT "


class Measured(NamedTuple):
    """What a run measured, after its warmup.

    Attributes:
      seconds: seconds per step of each call.
      loss: last loss.
      link_bytes: bytes per step over the loopback interface, by all processes of its network namespace.
    """

    seconds: list[float]
    loss: float
    link_bytes: float = math.nan


@dataclasses.dataclass(frozen=True)
class Stopwatch:
    """When a side waits, and what of it counts. A call is `wait` steps, then the last one's loss on the host.

    Attributes:
      wait: steps of a call, at least 1.
      warmup: steps before anything counts, rounded up to whole calls; they hold the tracing.
      calls: how many calls count.
    """

    wait: int
    warmup: int
    calls: int

    @property
    def warm_calls(self) -> int:
        """How many calls the warmup is."""
        return math.ceil(self.warmup / self.wait)

    def measure(self, step: Callable[[], Any], on_host: Callable[[Any], float]) -> Measured:
        """Runs all calls; returns what those that count have taken.

        Args:
          step: makes one update and returns its loss, wherever that is.
          on_host: waits for a loss.
        """
        seconds, loss = [], math.nan
        for call in range(self.warm_calls + self.calls):
            if call == self.warm_calls:
                sent = link_bytes()
            began = time.perf_counter()
            for _ in range(self.wait):
                last = step()
            loss = on_host(last)
            seconds.append((time.perf_counter() - began) / self.wait)
        return Measured(seconds[self.warm_calls :], loss, (link_bytes() - sent) / (self.calls * self.wait))


def link_bytes() -> int:
    """Returns how many bytes the loopback interface of this network namespace has carried."""
    lines = pathlib.Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.partition(":")[2].split()[0]) for line in lines if line.strip().startswith("lo:"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what every side is told."""
    parser.add_argument("--workload", default="mlp")
    parser.add_argument("--wait", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--calls", type=int, default=3)


def from_arguments(arguments: argparse.Namespace) -> Stopwatch:
    """The stopwatch that was asked for."""
    return Stopwatch(arguments.wait, arguments.warmup, arguments.calls)


def report(seconds: Sequence[float], loss: float, link_bytes: float = math.nan) -> None:
    """Prints what `compare.py` reads; the first rank calls it."""
    if not seconds:
        raise SystemExit("No whole call was measured: an epoch must be longer than --wait steps.")
    if not math.isfinite(loss):
        raise SystemExit(f"The loss is {loss}: this side does not train.")
    result = {"ms": [round(1e3 * value, 4) for value in seconds], "loss": round(loss, 4), "link_bytes": link_bytes}
    print(f"\n{RESULT}{json.dumps(result)}", flush=True)
