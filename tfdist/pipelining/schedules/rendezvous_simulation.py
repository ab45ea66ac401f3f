"""The times of a schedule's actions if a send waits until its message is received."""

from collections.abc import Callable, Sequence

from tfdist.pipelining.schedules.communication import Exchange, Program
from tfdist.pipelining.schedules.deadlock import deadlock
from tfdist.pipelining.schedules.schedule import Action, Message
from tfdist.pipelining.schedules.timeline import Span


def run_with_rendezvous(
    programs: Sequence[Program], computing: Callable[[Action], float], travelling: Callable[[Message], float]
) -> tuple[tuple[Span, ...], ...]:
    """Returns the times of all actions.

    The messages of an exchange are started together and travel side by side. Each begins when both of its processes have
    started it, and ends for both at once.

    Args:
      programs: the steps of each process.
      computing: returns the duration of an action.
      travelling: returns the duration of a message.

    Raises:
      InputError: processes wait for each other; the message names the cycle.
    """
    processes = [_Process(number, program, computing) for number, program in enumerate(programs)]
    started: dict[tuple[Message, int], float] = {}  # by message and process
    while any([process.advance(started, travelling) for process in processes]):
        pass
    waiting = {process.number: process.waits_for(started) for process in processes if not process.is_done}
    if waiting:
        raise deadlock(waiting)
    return tuple(tuple(process.spans) for process in processes)


class _Process:
    def __init__(self, number: int, program: Program, computing: Callable[[Action], float]):
        self.number = number
        self.spans: list[Span] = []
        self._program = program
        self._computing = computing
        self._place = 0
        self._clock = 0.0

    @property
    def is_done(self) -> bool:
        return self._place == len(self._program)

    def advance(self, started: dict[tuple[Message, int], float], travelling: Callable[[Message], float]) -> bool:
        """Executes steps until one has to wait; returns whether any was executed."""
        before = self._place
        while not self.is_done:
            step = self._program[self._place]
            if isinstance(step, Exchange):
                for message in step.messages:
                    started.setdefault((message, self.number), self._clock)
                if not all(self._other_end(message) in started for message in step.messages):
                    break
                ends = (max(self._clock, started[self._other_end(m)]) + travelling(m) for m in step.messages)
                self._clock = max(ends)
            else:
                self.spans.append(Span(step, self._clock, self._clock + self._computing(step)))
                self._clock = self.spans[-1].end
            self._place += 1
        return self._place != before

    def waits_for(self, started: dict[tuple[Message, int], float]) -> tuple[str, int]:
        """Returns what the process waits for, in the form of `deadlock`."""
        step = self._program[self._place]
        assert isinstance(step, Exchange)
        message = next(m for m in step.messages if self._other_end(m) not in started)
        verb = "to send {} to process" if message.source == self.number else "to receive {} from process"
        return verb.format(message.tag), self._other_end(message)[1]

    def _other_end(self, message: Message) -> tuple[Message, int]:
        return message, message.target if message.source == self.number else message.source
