"""How many processes a host may run now: a process that dies takes its slot along for a while."""

import math

LONGEST_REJOIN_SECONDS = 3600.0


class Slots:
    """The slots of one host in an elastic job.

    The first death puts a slot out for `rejoin_seconds`, each further one for twice as long, up to an hour: a host that
    is broken is tried again, ever more rarely. After an hour with all of them it counts as sound again. If the host list says
    another number than before, somebody has looked after the host, and all of it counts again.
    """

    def __init__(self, rejoin_seconds: float):
        """Args: rejoin_seconds: that the first slot is out; 0 for never, inf for ever."""
        self._first = self._pause = rejoin_seconds
        self._offered: int | None = None
        self._out: list[float] = []  # when each comes back
        self._whole = -math.inf  # since when none is out

    def offer(self, count: int) -> None:
        """Says how many slots the host has."""
        if count != self._offered and self._offered is not None:
            self._out = []
        self._offered = count

    @property
    def offered(self) -> int:
        """How many slots the host has, those that are out among them."""
        return self._offered or 0

    def died(self, count: int, now: float) -> None:
        """Says that so many of its processes have died."""
        if not count:
            return
        if now - self._whole > LONGEST_REJOIN_SECONDS:
            self._pause = self._first
        self._out += [now + self._pause] * count
        self._whole = max(self._whole, now + self._pause)
        self._pause = max(self._pause, min(2 * self._pause, LONGEST_REJOIN_SECONDS))

    def free(self, now: float) -> int:
        """How many processes the host may run."""
        self._out = [back for back in self._out if back > now]
        return max(0, self.offered - len(self._out))
