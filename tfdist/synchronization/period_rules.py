"""Rules that change the period of local SGD: `adaptive`. Does not import TensorFlow.

A rule decides from values that are equal on all processes, at exchanges only, and its state is kept in checkpoints. Every
period is an integer from 1 to `max_period`.
"""

import abc
import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tfdist.grammar.sync import Adaptive

_SHRINK = 0.5  # gamma of AdaComm, as in its paper
# Chosen here: the tolerance of `Divergence`, and the number of exchanges from which it learns its target.
_LOW, _HIGH, _SAMPLES = 0.7, 1.3, 10


class AtExchange(NamedTuple):
    """What a rule knows at an exchange, and before the first step.

    Attributes:
      step: number of updates done.
      rate: learning rate of the next step.
      rising: whether the learning rate rises, as in a warmup.
      divergence: `replica_divergence`; None before the first step.
    """

    step: int
    rate: float
    rising: bool
    divergence: float | None


class PeriodRule(abc.ABC):
    """A rule for the period; the base class keeps it in bounds.

    Attributes:
      period: the period in force.
    """

    def __init__(self, sync: Adaptive):
        """Begins with the period of the flag."""
        self._sync = sync
        self.period = sync.period
        self._state: dict[str, Any] = {}

    def observe(self, losses: Sequence[float]) -> None:
        """Receives the losses of steps, in order."""

    def decide(self, now: AtExchange) -> None:
        """Sets the period that begins now."""
        wanted = self._wanted(now)
        self.period = int(min(max(wanted, self._least), self._sync.max_period))  # in this order for infinity

    @abc.abstractmethod
    def _wanted(self, now: AtExchange) -> float:
        """Returns the period, an integer or infinity, regardless of its bounds."""

    @property
    def _least(self) -> int:
        return 1

    def to_json(self) -> dict[str, Any]:
        """Returns the state, for a checkpoint."""
        return {"period": self.period, **copy.deepcopy(self._state)}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Takes over what `to_json` returned."""
        self._state = {**self._state, **saved}
        self.period = self._state.pop("period", self.period)


class AdaComm(PeriodRule):
    """Shortens the period as the loss F falls (Wang and Joshi 2018, arXiv:1810.08313).

    With tau_0 the first period, eta the learning rate, and F_l the mean training loss of interval l, of `interval` steps,

        tau_l = ceil(sqrt(eta_0 / eta_l * F_l / F_0) tau_0)

    If that is not less than the period before, tau_l = ceil(tau_(l-1) / 2): the loss has reached the floor that the period
    sets. F_0 is the loss of the first step. The paper measures intervals by the clock, which differs between runs; here
    they are steps, so that runs can be repeated. An interval ends at the first exchange after its last step. Losses must
    be positive: otherwise the period stays. Chosen here: the period is not halved when the learning rate has changed.
    """

    def __init__(self, sync: Adaptive):
        """See base class."""
        super().__init__(sync)
        self._state = {"loss_0": None, "rate_0": None, "rate": None, "decided": None, "total": 0.0, "count": 0}

    def observe(self, losses: Sequence[float]) -> None:
        """See base class."""
        state = self._state
        if losses and state["loss_0"] is None:
            state["loss_0"] = float(losses[0])
        state["total"] += math.fsum(losses)
        state["count"] += len(losses)

    def _wanted(self, now: AtExchange) -> float:
        """See base class."""
        state = self._state
        if state["decided"] is None:
            state.update(rate_0=now.rate, rate=now.rate, decided=now.step)
            return self.period
        if now.step - state["decided"] < self._sync.interval or not state["count"]:
            return self.period
        loss, first, rate = state["total"] / state["count"], state["loss_0"], state["rate"]
        state.update(rate=now.rate, decided=now.step, total=0.0, count=0)
        if not (loss > 0 and first > 0 and state["rate_0"] > 0):
            return self.period
        found = math.sqrt(_ratio(state["rate_0"], now.rate) * loss / first) * self._sync.period
        wanted = math.ceil(found) if math.isfinite(found) else found
        return math.ceil(_SHRINK * self.period) if wanted >= self.period and now.rate == rate else wanted


class QuadraticRule(PeriodRule):
    """Lengthens the period as the learning rate eta falls (Gu et al. 2023, arXiv:2310.14423).

        H = max(H_base, floor((alpha / eta)^2))

    with H_base the first period, and eta the learning rate of the next step. While the learning rate rises, as in a warmup,
    the period is H_base, as the equation would begin with the longest; the authors' code has a parameter for it.
    """

    def __init__(self, sync: Adaptive):
        """See base class."""
        super().__init__(sync)
        self._state = {"rate": None}

    def _wanted(self, now: AtExchange) -> float:
        """See base class."""
        before = self._state["rate"]
        self._state["rate"] = now.rate
        if now.rising or (before is not None and now.rate > before):
            return self._sync.period
        assert self._sync.alpha is not None
        found = _ratio(self._sync.alpha, now.rate) ** 2
        return math.floor(found) if math.isfinite(found) else found

    @property
    def _least(self) -> int:
        return self._sync.period


class Divergence(PeriodRule):
    """Holds the divergence of replicas at a target, by one step at a time (Jiang and Agrawal 2020, arXiv:2007.06134).

    With S the mean square distance of replicas to their mean, here relative to the mean's norm, the square of
    `replica_divergence`, and W what it is to be,

        p' = p + 1 if S < 0.7 W,        p' = p - 1 if S > 1.3 W,        else p' = p

    W is `target` squared. Without a target, W = eta C, with eta the learning rate and C the mean of S / eta over the first
    10 exchanges, in which the period does not change: as replicas differ less and less at the same period, it lengthens.
    Chosen here: the distance relative to the norm, the factors 0.7 and 1.3, and the 10 exchanges.
    """

    def __init__(self, sync: Adaptive):
        """See base class."""
        super().__init__(sync)
        self._state = {"rate": None, "samples": []}

    def _wanted(self, now: AtExchange) -> float:
        """See base class."""
        rate, samples = self._state["rate"], self._state["samples"]  # rate: with which this divergence arose
        self._state["rate"] = now.rate
        if now.divergence is None:
            return self.period
        square = now.divergence**2
        if self._sync.target is not None:
            wanted = self._sync.target**2
        elif len(samples) < _SAMPLES:
            if rate:
                samples.append(square / rate)
            return self.period
        else:
            wanted = rate * math.fsum(samples) / len(samples)
        return self.period + (square < _LOW * wanted) - (square > _HIGH * wanted)


RULES: Mapping[str, type[PeriodRule]] = {"adacomm": AdaComm, "qsr": QuadraticRule, "divergence": Divergence}


def _ratio(numerator: float, denominator: float) -> float:
    """Returns a quotient, infinite if the denominator is 0."""
    return numerator / denominator if denominator > 0 else math.inf
