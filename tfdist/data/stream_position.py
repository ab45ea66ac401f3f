"""A run's position in the stream of examples, even if its global batch size has changed."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class StreamPosition:
    """The position after `step` steps and `examples` examples; further steps have `batch_size` examples each.

    If the batch size never changes, this is `StreamPosition(batch_size)`: step k begins at position k * batch_size.

    Attributes:
      batch_size: global batch size, at least 1.
      step: first step with this batch size, at least 0.
      examples: examples used in all steps before it, at least 0.
    """

    batch_size: int
    step: int = 0
    examples: int = 0

    def before(self, step: int) -> int:
        """Returns the number of examples before a step, i.e. the position of its first example."""
        return self.examples + (step - self.step) * self.batch_size

    def steps_for(self, examples: int) -> int:
        """Returns the number of the run's steps after which at least `examples` examples are used."""
        return self.step - (self.examples - examples) // self.batch_size

    def epoch(self, step: int, size: int) -> int:
        """Returns the epoch, from 0, of a step's first example, for epochs of `size` examples."""
        return self.before(step) // size

    def end_of_epoch(self, epoch: int, size: int) -> int:
        """Returns the number of steps after which an epoch is complete; several short epochs may end with one step."""
        return self.steps_for((epoch + 1) * size)

    def epochs_from(self, step: int, size: int) -> int:
        """Returns the position from which whole epochs after a step are counted.

        If the previous step ended an epoch, it is the end of that epoch, even if the step used some examples beyond it;
        otherwise it is the step's first example.
        """
        into = self.before(step) % size
        return self.before(step) - (into if into < self.batch_size else 0)

    def then(self, step: int, batch_size: int) -> "StreamPosition":
        """Returns the position with another batch size from a step on; itself if the batch size is the same."""
        return self if batch_size == self.batch_size else StreamPosition(batch_size, step, self.before(step))
