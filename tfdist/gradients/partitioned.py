"""A reducer that partitions a list of tensors among several reducers."""

from collections.abc import Sequence

import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.distribution.strategy import State
from tfdist.gradients.reducer import Reduced, Reducer, specs_of, split_at


class PartitionedReducer(Reducer):
    """Passes each tensor of a list to the reducer of its partition."""

    def __init__(self, partitions: Sequence[tuple[Sequence[int], Reducer]]):
        """Initializes the partitions.

        Args:
          partitions: for each partition, the indices of its tensors in the list and their reducer; every index is in
            exactly one partition.
        """
        self._partitions = [(list(places), reducer) for places, reducer in partitions if places]
        self.keeps_shapes = True

    def state(self, specs: Sequence[tf.TensorSpec]) -> list[State]:
        """See base class."""
        return [state for places, reducer in self._partitions for state in reducer.state([specs[i] for i in places])]

    def reduce(
        self, tensors: Sequence[tf.Tensor], state: Sequence[tf.Tensor], collectives: Collectives, *, name: str
    ) -> Reduced:
        """See base class."""
        totals, sent = list(tensors), list(tensors)
        left, new_state, witnesses = list(state), [], []
        for number, (places, reducer) in enumerate(self._partitions):
            mine = [tensors[i] for i in places]
            own, left = split_at(left, len(reducer.state(specs_of(mine))))
            part = reducer.reduce(mine, own, collectives, name=f"{name}/partition{number}")
            for i, total, summand in zip(places, part.totals, part.sent, strict=True):
                totals[i], sent[i] = total, summand
            new_state += part.state
            witnesses += part.witnesses
        return Reduced(totals, sent, new_state, witnesses)
