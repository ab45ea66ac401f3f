"""The base class of reporters with a progress bar."""

import abc
import contextlib
from collections.abc import Callable, Iterator, Mapping
from time import monotonic

from tfdist.coordination import Json
from tfdist.reporting.banner import banner
from tfdist.reporting.bar_text import BarText
from tfdist.reporting.plain_reporter import line, printable
from tfdist.reporting.reporter import Reporter, RunPlan
from tfdist.reporting.schema import EVAL


class BarReporter(Reporter, abc.ABC):
    """Displays a progress bar: epoch, steps, elapsed and remaining time, loss, first metric, and examples/s.

    Where there is little room, less is shown; see `BarText`. The description of the run and evaluations remain as lines
    above the bar, and the outcome as a line below it.

    Args:
      seconds: minimum interval between two draws. The caller draws, so that no thread is needed during training.
      clock: monotonic clock in seconds.
    """

    def __init__(self, seconds: float = 0.1, clock: Callable[[], float] = monotonic):
        self._seconds, self._clock = seconds, clock
        self._plan: RunPlan | None = None
        self._text: BarText | None = None
        self._drawn = clock()

    @abc.abstractmethod
    def _print(self, text: str) -> None:
        """Writes a line that remains; above the bar, if it is open."""

    @abc.abstractmethod
    def _open_bar(self) -> None:
        """Opens the bar at the start of a run."""

    @abc.abstractmethod
    def _draw_bar(self, text: BarText) -> None:
        """Draws the bar, which is open."""

    @abc.abstractmethod
    def _close_bar(self) -> None:
        """Closes the bar; its last state remains."""

    def start(self, plan: RunPlan) -> None:
        """See base class."""
        for row in banner(plan.description):
            self._print(row)
        self._plan, self._text = plan, BarText(plan, self._clock)
        self._open_bar()
        self._draw()

    @contextlib.contextmanager
    def busy(self, task: str) -> Iterator[None]:
        """See base class."""
        self._set_status(f"{task} ...")
        yield
        self._set_status("")

    def progress(self, step: int, record: Mapping[str, float]) -> None:
        """See base class."""
        if self._text is not None:
            self._text.update(step, record)
        if self._clock() - self._drawn >= self._seconds:
            self._draw()

    def record(self, record: Mapping[str, Json]) -> None:
        """See base class."""
        if record.get("kind") == EVAL or self._text is None:
            self._print(line(record, self._plan))
        elif "step" in record:
            self._text.update(int(record["step"]), record)
        self._draw()

    def close(self, outcome: str) -> None:
        """See base class."""
        if self._text is not None:
            self._set_status("")
            self._close_bar()
            self._text = None
        if outcome:
            self._print(f"run ended: {printable(outcome)}")

    def _set_status(self, text: str) -> None:
        if self._text is not None:
            self._text.set_status(text)
            self._draw()

    def _draw(self) -> None:
        if self._text is not None:
            self._draw_bar(self._text)
            self._drawn = self._clock()
