"""`FirstTrace`: what one process refuses while it traces a step, all processes refuse."""

import contextlib
from collections.abc import Iterator

from tfdist.distribution.strategy import Strategy


class FirstTrace:
    """The first trace of the parts of a step, so that no process runs one for which another will not arrive."""

    def __init__(self, strategy: Strategy):
        """Initializes it; nothing is traced yet.

        Args:
          strategy: the strategy of the step.
        """
        self._strategy = strategy
        self._done: set[str] = set()

    @contextlib.contextmanager
    def of(self, part: str) -> Iterator[None]:
        """Context of a trace, which raises everywhere if it raises somewhere; does nothing for a part that was traced before.

        Args:
          part: name of the part.
        """
        with contextlib.nullcontext() if part in self._done else self._strategy.refused_together(f"step/{part}"):
            yield
        self._done.add(part)
