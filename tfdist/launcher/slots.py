"""Slots of a host, the processes that it may currently run: a failed process disables its slot for a while."""

import math

LONGEST_REJOIN_SECONDS = 3600.0


class Slots:
    """The slots of one host in an elastic job.

    The first failure disables a slot for `rejoin_seconds`, each further one for twice as long, up to an hour, so that a
    broken host is retried less and less often. After an hour with all slots enabled the delay is reset. If the host
    list changes the number of slots, the host has presumably been repaired, and all slots are enabled again.
    """

    def __init__(self, rejoin_seconds: float):
        """Initializes with `rejoin_seconds`: how long the first slot is disabled; 0 for not at all, inf forever."""
        self._first = self._pause = rejoin_seconds
        self._offered: int | None = None
        self._out: list[float] = []  # when each disabled slot comes back
        self._whole = -math.inf  # since when all slots are enabled

    def offer(self, count: int) -> None:
        """Sets the number of slots of the host."""
        if count != self._offered and self._offered is not None:
            self._out = []
        self._offered = count

    @property
    def offered(self) -> int:
        """Number of slots of the host, including disabled ones."""
        return self._offered or 0

    def died(self, count: int, now: float) -> None:
        """Disables the slots of `count` failed processes."""
        if not count:
            return
        if now - self._whole > LONGEST_REJOIN_SECONDS:
            self._pause = self._first
        self._out += [now + self._pause] * count
        self._whole = max(self._whole, now + self._pause)
        self._pause = max(self._pause, min(2 * self._pause, LONGEST_REJOIN_SECONDS))

    def free(self, now: float) -> int:
        """Returns how many processes the host may run."""
        self._out = [back for back in self._out if back > now]
        return max(0, self.offered - len(self._out))
