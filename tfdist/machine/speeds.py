"""Measures an all-reduce of each engine between two processes, by `tfdist bench`, and names the fastest."""

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tfdist.config.strategy_registry import DECLARATIONS
from tfdist.errors.numbers import byte_size
from tfdist.machine.children import Children
from tfdist.machine.frameworks import Frameworks, last_object
from tfdist.machine.report import Finding, Status
from tfdist.machine.smoke_tests import SmokeTestResult, run_smoke_test

SIZES = (64 * 2**10, 4 * 2**20, 32 * 2**20)  # bytes: a small layer, a bucket of gradients, a large table
_BUCKET = SIZES[1]
_BENCHMARK = ("tfdist.bench", "collectives", "--operations=all_reduce", f"--sizes={','.join(map(str, SIZES))}")


def measure(
    children: Children, frameworks: Frameworks, names: Sequence[str], seconds: float
) -> Iterator[SmokeTestResult]:
    """Measures one engine after the other, with two processes each.

    Args:
      children: starts the processes.
      frameworks: TensorFlow and Horovod on this machine.
      names: names of the strategies.
      seconds: deadline of each measurement.
    """
    for declaration in DECLARATIONS:
        if declaration.name in names and "all_reduce" in (declaration.options or ()):
            for test in declaration.smoke_tests:
                if test.processes > 1 and "shard" not in test.options:  # which does not change an all-reduce
                    with tempfile.TemporaryDirectory() as directory:
                        hidden = [f"--output_dir={directory}/bench"]
                        yield run_smoke_test(children, frameworks, declaration.name, test, _BENCHMARK, seconds, hidden)


def finding(speed: SmokeTestResult) -> Finding:
    """Returns a measurement's line of the report."""
    times = [f"{byte_size(size)} {1e3 * each:.3g} ms" for size, each in _seconds(speed).items()]
    return speed.finding(f"{speed.engine:<20}", *(f"{time:<16}" for time in times))


def facts(speed: SmokeTestResult) -> dict[str, Any]:
    """Returns values of JSON."""
    measurements = [{"bytes": size, "seconds_median": each} for size, each in _seconds(speed).items()]
    return {**speed.facts(), "measurements": measurements}


def fastest(speeds: Iterable[SmokeTestResult]) -> Finding | None:
    """Returns the fastest engine for a bucket of gradients, with its flags; None if there is no choice."""
    ranking = sorted((speed for speed in speeds if _seconds(speed)), key=lambda speed: _seconds(speed)[_BUCKET])
    if len(ranking) < 2:
        return None
    best, second, *_ = ranking
    ratio = _seconds(second)[_BUCKET] / _seconds(best)[_BUCKET]
    text = f"fastest for {byte_size(_BUCKET)}: {best.engine}, {ratio:.2g} times as fast as {second.engine}"
    return Finding(Status.OK, text, f"tfdist launch --processes=2 -- tfdist train {best.flags}")


def _seconds(speed: SmokeTestResult) -> dict[int, float]:
    """Returns the median seconds of an all-reduce for each of `SIZES`; empty if it failed or was not measured."""
    if speed.ended is None or speed.ended.code:
        return {}
    rows = last_object(speed.ended.text)["measurements"]
    return {size: row["seconds_median"] for size, row in zip(SIZES, rows, strict=True)}
