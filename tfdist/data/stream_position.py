"""A run's place in the stream of examples, also of one whose global batch changed on the way."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class StreamPosition:
    """Behind `step` steps and `examples` examples, in a run whose steps have `batch_size` examples each from there on.

    Where the batch never changes this is `StreamPosition(batch_size)`: step k begins at position k * batch_size of the stream.

    Attributes:
      batch_size: examples of a global batch, at least 1.
      step: the first step with this batch, at least 0.
      examples: used in all steps before it, at least 0.
    """

    batch_size: int
    step: int = 0
    examples: int = 0

    def before(self, step: int) -> int:
        """How many examples come before a step: the place in the stream of its first one."""
        return self.examples + (step - self.step) * self.batch_size

    def steps_for(self, examples: int) -> int:
        """After how many steps of the run at least so many examples are used."""
        return self.step - (self.examples - examples) // self.batch_size

    def epoch(self, step: int, size: int) -> int:
        """The epoch of `size` examples, from 0, that a step belongs to: that of its first example."""
        return self.before(step) // size

    def end_of_epoch(self, epoch: int, size: int) -> int:
        """After how many steps of the run an epoch's last example is used; several short epochs may end with one step."""
        return self.steps_for((epoch + 1) * size)

    def epochs_from(self, step: int, size: int) -> int:
        """From which place on whole epochs behind a step are counted.

        Where the step before has ended an epoch, that is the epoch's end, though the step may have used some examples more;
        else the step's first example.
        """
        into = self.before(step) % size
        return self.before(step) - (into if into < self.batch_size else 0)

    def then(self, step: int, batch_size: int) -> "StreamPosition":
        """The same until a step, and another batch from there on; itself if the batch stays."""
        return self if batch_size == self.batch_size else StreamPosition(batch_size, step, self.before(step))
