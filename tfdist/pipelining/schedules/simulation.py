"""Predicts the timeline of a schedule from the durations of its actions and messages."""

from collections.abc import Sequence

from tfdist.errors import InputError
from tfdist.errors.number_checks import is_number
from tfdist.pipelining.schedules.communication import exchanges
from tfdist.pipelining.schedules.eager_simulation import run_eagerly
from tfdist.pipelining.schedules.rendezvous_simulation import run_with_rendezvous
from tfdist.pipelining.schedules.schedule import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Action,
    Message,
    Schedule,
)
from tfdist.pipelining.schedules.timeline import Timeline

EAGER, RENDEZVOUS = "eager", "rendezvous"
Durations = float | Sequence[float]


def simulate(
    schedule: Schedule,
    *,
    forward: Durations,
    backward: Durations,
    weight: Durations | None = None,
    input_gradient: Durations | None = None,
    message: Durations = 0.0,
    sends: str = EAGER,
) -> Timeline:
    """Predicts when each process computes which action.

    Durations are in seconds, one for all stages or one for each. Messages do not slow each other down.

    Args:
      schedule: the schedule.
      forward: duration of a forward pass.
      backward: duration of a whole backward pass, "B".
      weight: of this, the gradient of the weights, "W"; half of it by default.
      input_gradient: duration of the gradient of the input, "I"; the rest of `backward` by default, which assumes that a
        backward pass in two parts costs no more than a whole one.
      message: duration of a message between stage v and stage v + 1, in either direction; one for all v, or one for each.
      sends: "eager" if a process continues after a send at once, as TensorFlow's graphs do; "rendezvous" if it waits until the
        message has been received, in the order of `communication.exchanges`.

    Raises:
      InputError: processes wait for each other, and the message names the cycle; or an argument is out of range.
    """
    if sends not in (EAGER, RENDEZVOUS):
        raise InputError(f"sends must be {EAGER} or {RENDEZVOUS}. Received: {sends!r}.")
    whole = _each(backward, schedule.stages, "backward")
    weights = [seconds / 2 for seconds in whole] if weight is None else _each(weight, schedule.stages, "weight")
    rest = [max(both - w, 0.0) for both, w in zip(whole, weights, strict=True)]
    durations = {
        FORWARD: _each(forward, schedule.stages, "forward"),
        BACKWARD: whole,
        WEIGHT_GRADIENT: weights,
        INPUT_GRADIENT: rest if input_gradient is None else _each(input_gradient, schedule.stages, "input_gradient"),
    }
    links = _each(message, schedule.stages - 1, "message")

    def computing(action: Action) -> float:
        return durations[action.kind][action.stage]

    def travelling(message: Message) -> float:
        return links[min(message.stage, message.to_stage)]

    if sends == EAGER:
        spans = run_eagerly(schedule, computing, travelling)
    else:
        spans = run_with_rendezvous(exchanges(schedule), computing, travelling)
    return Timeline(spans, schedule.live_activations())


def _each(durations: Durations, count: int, name: str) -> list[float]:
    """Returns a duration for each stage, or for each boundary between two."""
    found = [durations] * count if is_number(durations) else list(durations)  # type: ignore[arg-type]
    if len(found) != count or not all(is_number(seconds) and 0 <= seconds < float("inf") for seconds in found):
        raise InputError(
            f"{name} must be a number of seconds of at least 0, or {count} of them. Received: {durations!r}. Give one for all, "
            "or a list with one for each."
        )
    return [float(seconds) for seconds in found]
