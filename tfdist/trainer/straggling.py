"""What is done about ranks that are late in a step: checks of `straggler`, and the limit of time that is measured."""

import dataclasses
import logging
from typing import Any

import numpy as np

from tfdist.coordination.timeouts import LONG_SECONDS
from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError
from tfdist.grammar.balance import EQUAL, MEASURED, Balance, parse_balance
from tfdist.grammar.straggler import BALANCE, Straggler, balanced, parse_straggler
from tfdist.step.compiled_loop import LoopResult
from tfdist.step.dropping_step import LIMIT
from tfdist.step.settings import Settings
from tfdist.trainer.balancing import balance_on
from tfdist.trainer.drop_limit import LEAST_GAIN, MOST_DROPPED, Limit, fastest_limit
from tfdist.trainer.program import Program

_log = logging.getLogger(__name__)
_STEPS = 100  # that are measured before a decision
_CHECKED_STEPS = 25  # after which the rows that were dropped are compared with what was expected
_DROPPED_TOO_MANY = 0.2  # fraction of their rows, for a new measurement


def straggler_on(text: str, balance: str, strategy: Strategy) -> tuple[Straggler, Balance]:
    """Returns the values of two flags or arguments, checked for a strategy.

    Raises:
      InputError: one is not valid, they contradict each other, or the strategy cannot do it.
    """
    try:
        straggler = parse_straggler(text)
    except InputError as error:
        raise InputError(f"--straggler: {error}".rstrip(".") + ".") from error
    if straggler != Straggler() and strategy.compiles_replicas:
        raise InputError(
            f"Strategy {strategy.name} needs equally many rows on each replica. Received: --straggler={text}. Leave out "
            "--straggler, or use another strategy."
        )
    if straggler.kind == BALANCE and parse_balance(balance).kind not in (EQUAL, MEASURED):
        raise InputError(
            "Rows are allocated by measured speed or by given weights. Received: "
            f"--straggler={text} and --balance={balance}. Leave out one of them."
        )
    found = balance_on(balanced(straggler, balance), strategy)
    if not straggler.drops:
        return straggler, found
    if found.kind == MEASURED:
        raise InputError(
            "Speeds are measured over full steps, but late replicas drop micro-steps. Received: "
            f"--straggler={text} and --balance={balance}. Use --balance=weights(...), or leave out one of them."
        )
    if len(strategy.local_replicas) > 1:
        raise InputError(
            "Only replicas in processes of their own can leave a step early. Received: "
            f"--straggler={text} and strategy {strategy.name}. Use strategy multiworker or horovod, or leave out --straggler."
        )
    return straggler, found


def checked_straggler(settings: Settings, strategy: Strategy) -> Settings:
    """Returns options of a step in which a single replica leaves out nothing, as no other waits for it.

    Raises:
      InputError: with these options, late replicas cannot leave out micro-steps.
    """
    if not settings.straggler.drops:
        return settings
    if settings.micro_steps == 1:
        raise InputError(
            "A late replica leaves out micro-steps, and needs several of them. Received: "
            f"--straggler={settings.straggler} and --accumulate_steps=1. Use --accumulate_steps=4."
        )
    if settings.sync.exchanges_weights:
        raise InputError(
            "Replicas that train locally do not wait for each other in a step. Received: "
            f"--straggler={settings.straggler} and --sync={settings.sync}. Leave out one of them."
        )
    return settings if strategy.replicas > 1 else dataclasses.replace(settings, straggler=Straggler())


class Straggling:
    """Observes the calls of a run in which late ranks leave out micro-steps; every process has one.

    A measured limit is part of the steps' state. It is chosen from the times of steps in which nothing is left out, by rank
    0 for all ranks, and measured again when ranks leave out far more than was expected.
    """

    def __init__(self, program: Program, batch_size: int):
        """Initializes without observations.

        Args:
          program: what is trained.
          batch_size: global batch size.
        """
        self._program, self._strategy = program, program.strategy
        self._batch_size = batch_size
        self._is_measured = program.settings.straggler.is_measured
        self._limit = program.store.variables([LIMIT])[0] if self._is_measured else None
        self._is_first = True  # which has costs of its own, such as compilation
        self._has_said = False
        self._forget()

    def after_call(self, result: LoopResult, seconds: float) -> None:
        """Observes a call of the compiled loop; every process must call it.

        Args:
          result: result of the call.
          seconds: wall time of the call.
        """
        if not self._is_measured or self._is_first:
            self._is_first = False
            return
        dropped, [own] = result.dropped[0].numpy(), np.moveaxis(result.dropped[1].numpy(), 1, 0)
        self._ends.append(own)
        self._seconds += seconds
        self._dropped += int(dropped[:, 0].sum())
        steps, has_limit = sum(map(len, self._ends)), np.isfinite(self._seconds_at_most())
        if steps < (_CHECKED_STEPS if has_limit else _STEPS):
            return
        if not has_limit:
            self._decide()
        elif self._dropped > _DROPPED_TOO_MANY * self._batch_size * steps:
            self._take(np.inf)
        self._forget()

    def _seconds_at_most(self) -> float:
        seconds, replicas = self._program.store.array(LIMIT.name).values
        return float(seconds) if replicas == self._strategy.replicas else np.inf

    def _decide(self) -> None:
        group, own = self._strategy.group, np.concatenate(self._ends)
        everyone: Any = group.gather("straggler/times", own.round(6).tolist(), LONG_SECONDS)
        found: Any = group.broadcast(
            "straggler/limit", self._fastest(everyone) if group.rank == 0 else None, LONG_SECONDS
        )
        if found is None:
            self._say_that_nothing_is_dropped()
            return
        limit = Limit(*found)
        if self._strategy.is_chief:
            _log.info(
                "From now on, a rank that has computed for %.3g s in a step begins no further micro-step: that is expected to "
                "drop %.1f%% of the rows, and to compute %.0f%% more rows per second.",
                limit.seconds,
                100 * limit.dropped,
                100 * limit.gain,
            )
        self._take(limit.seconds)

    def _say_that_nothing_is_dropped(self) -> None:
        if self._strategy.is_chief and not self._has_said:
            _log.info(
                "No rows are dropped so far: of the limits that drop at most %.0f%%, none is expected to compute %.0f%% more "
                "rows per second.",
                100 * MOST_DROPPED,
                100 * LEAST_GAIN,
            )
        self._has_said = True

    def _fastest(self, everyone: list[list[list[float]]]) -> Limit | None:
        ends = np.stack(everyone, axis=1)  # [steps, ranks, micro-steps]
        other = self._seconds / len(ends) - float(ends[..., -1].max(axis=1).mean())
        return fastest_limit(ends, max(other, 0.0))

    def _take(self, seconds: float) -> None:
        """Assigns a limit; every process must do the same at the same step."""
        variable, value = self._limit, [seconds, float(self._strategy.replicas)]
        assert variable is not None
        self._strategy.run(lambda: variable.assign(value))

    def _forget(self) -> None:
        self._ends: list[np.ndarray] = []
        self._seconds, self._dropped = 0.0, 0
