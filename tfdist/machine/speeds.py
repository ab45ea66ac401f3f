"""Measures an all-reduce of each engine between two processes, by `tfdist.bench`, and names the fastest."""

import shlex
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tfdist.config.strategy_declaration import Trial
from tfdist.config.strategy_registry import DECLARATIONS
from tfdist.errors.byte_sizes import byte_size
from tfdist.machine.children import Children
from tfdist.machine.engines import flags_of, variables_of
from tfdist.machine.frameworks import Frameworks, last_object
from tfdist.machine.report import Finding, Status

SIZES = (64 * 2**10, 4 * 2**20, 32 * 2**20)  # bytes: a small layer, a bucket of gradients, a large table
_BUCKET = SIZES[1]
_BENCHMARK = ("collectives", "--operations=all_reduce", f"--sizes={','.join(map(str, SIZES))}", "--json")


class Speed(NamedTuple):
    """The measurement of one engine.

    Attributes:
      strategy: name of the strategy.
      library: the library of its collectives; empty if it has no choice.
      flags: flags that choose the engine.
      seconds: median seconds of an all-reduce for each of `SIZES`; empty if it failed or was not made.
      status: whether it was measured.
      reason: why it failed or was not made, as one line.
      remedy: the command that installs it.
    """

    strategy: str
    library: str
    flags: str
    seconds: tuple[float, ...] = ()
    status: Status = Status.OK
    reason: str = ""
    remedy: str = ""

    @property
    def title(self) -> str:
        """The engine for people."""
        return f"{self.strategy} over {self.library}" if self.library else self.strategy

    def finding(self) -> Finding:
        """Returns its line of the report."""
        times = [f"{byte_size(size)} {1e3 * each:.3g} ms" for size, each in zip(SIZES, self.seconds, strict=False)]
        text = "  ".join([f"{self.title:<20}", *(f"{time:<16}" for time in times), self.reason])
        return Finding(self.status, text.rstrip(), self.remedy)

    def facts(self) -> dict[str, Any]:
        """Returns values of JSON."""
        return {
            "strategy": self.strategy,
            "library": self.library or None,
            "flags": self.flags,
            "status": str(self.status),
            "reason": self.reason or None,
            "measurements": [
                {"bytes": size, "seconds_median": each} for size, each in zip(SIZES, self.seconds, strict=False)
            ],
        }


def measured(children: Children, frameworks: Frameworks, names: Sequence[str], seconds: float) -> Iterator[Speed]:
    """Measures one engine after the other, with two processes each.

    Args:
      children: starts the processes.
      frameworks: what they run on.
      names: names of the strategies.
      seconds: deadline of each measurement.
    """
    for declaration in DECLARATIONS:
        if declaration.name in names and "all_reduce" in (declaration.options or ()):
            for trial in declaration.trials:
                if trial.processes > 1:
                    yield _measured(children, frameworks, declaration.name, trial, seconds)


def _measured(children: Children, frameworks: Frameworks, strategy: str, trial: Trial, seconds: float) -> Speed:
    flags = flags_of(strategy, trial)
    speed = Speed(strategy, trial.library, shlex.join(flags))
    if obstacle := frameworks.obstacle(trial):
        return speed._replace(status=obstacle.status, reason=obstacle.text, remedy=obstacle.remedy)
    with tempfile.TemporaryDirectory() as directory:
        arguments = [*_BENCHMARK, *flags, f"--output_dir={directory}/bench"]
        ended = children.run("tfdist.bench", arguments, trial.processes, seconds, variables_of(trial, frameworks))
    if ended.code:
        return speed._replace(status=Status.FAILED, reason=ended.reason)
    return speed._replace(seconds=tuple(row["seconds_median"] for row in last_object(ended.text)["measurements"]))


def fastest(speeds: Sequence[Speed]) -> Finding | None:
    """Returns which engine is the fastest for a bucket of gradients, with its flags; None if there is no choice."""
    times = {speed: speed.seconds[SIZES.index(_BUCKET)] for speed in speeds if speed.seconds}
    if len(times) < 2:
        return None
    best, second, *_ = sorted(times, key=times.__getitem__)
    ratio = times[second] / times[best]
    text = f"fastest for {byte_size(_BUCKET)}: {best.title}, {ratio:.2g} times as fast as {second.title}"
    return Finding(Status.OK, text, f"python -m tfdist.launch --processes=2 -- python -m tfdist.train {best.flags}")
