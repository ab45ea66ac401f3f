"""`ShardedOptimizer`: each replica holds a part of the optimizer's state and updates the corresponding weights.

This is stage 1 of ZeRO (Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models,
arXiv:1910.02054). With weights w of which replica r owns w_r, slots s_r, and gradients g that are summed over replicas as
usual:

    w_r, s_r = update(w_r, s_r, g_r)        on replica r
    w = all_gather(w_r)

A part consists of whole variables, as in PyTorch's `ZeroRedundancyOptimizer`, so that updates that are not elementwise
(LARS, LAMB, Muon, Adafactor) are the same. Everything before the update sees all gradients, so results are bitwise equal to
those without sharding. Memory: 1/N of the slots, if no variable is larger than that. Cost: P (N - 1) / N
elements received in a step in addition to the all-reduce of the gradients, for P parameters and N replicas.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives.interface import to_transferable
from tfdist.distribution.balanced_parts import Message, balanced_owners, messages
from tfdist.distribution.strategy import OptimizerShards
from tfdist.errors import InputError

if TYPE_CHECKING:
    from tfdist.distribution.strategy import Strategy

_MIN_MESSAGE_BYTES = 2**22  # small variables share a message


class ShardedOptimizer(OptimizerShards):
    """The optimizer's state, divided by trained variable among replicas, one in each process."""

    _strategy: "Strategy"

    def __init__(self, strategy: "Strategy"):
        """Initializes the shards; no state is created yet.

        Args:
          strategy: the strategy, whose `replicas` are known.

        Raises:
          InputError: this process has several replicas.
        """
        super().__init__(strategy)
        if len(strategy.local_replicas) != 1:
            raise InputError(
                "--shard=optimizer needs one replica in each process. Received: "
                f"{len(strategy.local_replicas)} in this one. Start one process per device."
            )
        self.parts, self._rank = strategy.replicas, strategy.local_replicas.start
        self._owners: dict[int, int] = {}  # by the id of a trained variable, or of a variable of the optimizer

    def built_later(self, model: keras.Model) -> contextlib.AbstractContextManager:
        """See base class."""
        return keras_internals.without_optimizer(model)

    def build(self, model: keras.Model) -> None:
        """See base class; every process computes the same division, without communication.

        Raises:
          InputError: there are fewer trained variables than replicas.
        """
        variables = list(model.trainable_variables)
        owners = balanced_owners([keras_internals.bytes_of(variable) for variable in variables], self.parts)
        own_numbers = {number for number, owner in enumerate(owners) if owner == self._rank}
        with self._strategy.process_device():
            slots = keras_internals.build_partially(model.optimizer, variables, own_numbers)
        self._owners = {id(variable): owner for variable, owner in zip(variables, owners, strict=True)}
        self._owners |= {slot: owners[number] for slot, number in slots.items()}

    def apply(
        self, optimizer: keras.Optimizer, gradients: Sequence[tf.Tensor], variables: Sequence[keras.Variable]
    ) -> None:
        """See base class; updates the weights whose optimizer state this replica owns."""
        own_variables = [variable for variable in variables if self.is_here_only(variable)]
        with (
            keras_internals.averages_of(optimizer, own_variables),
            keras_internals.updating_some(optimizer, own_variables),
        ):
            super().apply(optimizer, gradients, variables)

    def exchange(self, variables: Sequence[keras.Variable]) -> None:
        """See base class; the owner of a variable sends it to all."""
        values = [tf.identity(keras_internals.value_of(variable)) for variable in variables]
        updated = self.from_owners(variables, values, "updated")
        others = [i for i, variable in enumerate(variables) if not self.is_here_only(variable)]
        with self._strategy.own_copies([variables[i] for i in others]):
            for i in others:
                keras_internals.value_of(variables[i]).assign(updated[i])

    def state_bytes(self, optimizer: keras.Optimizer) -> list[int]:
        """See base class; variables that every replica holds are counted in each part."""
        owned = [
            (self._owners.get(id(variable)), keras_internals.bytes_of(variable)) for variable in optimizer.variables
        ]
        return [sum(count for owner, count in owned if owner in (None, part)) for part in range(self.parts)]

    def is_here_only(self, variable: keras.Variable) -> bool:
        """See base class; for a trained variable, whether this replica updates it."""
        return self._owners.get(id(variable)) == self._rank

    def is_of_all(self, variable: keras.Variable) -> bool:
        """See base class."""
        return id(variable) not in self._owners

    def from_owners(
        self, variables: Sequence[keras.Variable], values: Sequence[tf.Tensor], name: str
    ) -> list[tf.Tensor]:
        """See base class; each message is a vector of several variables per owner."""
        results = list(values)
        for dtype in dict.fromkeys(value.dtype for value in values):
            numbers = [i for i, value in enumerate(values) if value.dtype == dtype]
            sizes = [values[i].shape.num_elements() for i in numbers]
            owners = [self._owners[id(variables[i])] for i in numbers]
            plan = messages(sizes, owners, self.parts, _MIN_MESSAGE_BYTES // dtype.size)
            own = [values[i] for i in numbers]
            for message_number, message in enumerate(plan):
                for number, value in self._exchanged(
                    message, own, f"optimizer/{name}/{dtype.name}/{message_number}"
                ).items():
                    results[numbers[number]] = value
        return results

    def _exchanged(self, message: Message, values: Sequence[tf.Tensor], name: str) -> dict[int, tf.Tensor]:
        """Returns the values of the variables in a message that others own, by number."""
        collectives = self._strategy.collectives
        own_vectors = [tf.reshape(values[piece.number], [-1]) for piece in message.pieces[self._rank]]
        dtype = values[0].dtype
        padding = message.length - sum(vector.shape[0] for vector in own_vectors)
        vector = tf.concat([*own_vectors, tf.zeros([padding], dtype)], 0)
        [gathered] = collectives.all_gather([to_transferable(vector, collectives)], name=name)
        received = {}
        for owner, pieces in enumerate(message.pieces):
            for number, start in pieces if owner != self._rank else ():
                begin = owner * message.length + start
                part = gathered[begin : begin + values[number].shape.num_elements()]
                received[number] = tf.cast(tf.reshape(part, values[number].shape), dtype)
        return received

    @contextlib.contextmanager
    def complete(self, variables: Sequence[keras.Variable]) -> Iterator[None]:
        """See base class; one variable at a time, so that only the chief has them all."""
        values: dict[int, tf.Tensor] = {}
        missing: list[keras.Variable] = []
        for variable in variables:
            owner = self._owners.get(id(variable), 0)
            is_slot = not variable.trainable and id(variable) in self._owners
            if is_slot and owner:
                value = self._sent_by(owner, variable)
                if self._rank == 0:
                    missing.append(variable)
                    values[id(variable)] = value
        with keras_internals.read_by(missing, lambda variable: values[id(variable)]):
            yield

    def _sent_by(self, owner: int, variable: keras.Variable) -> tf.Tensor:
        strategy = self._strategy

        def send() -> tf.Tensor:
            tf_variable = keras_internals.value_of(variable)
            value = tf.zeros(variable.shape, variable.dtype) if tf_variable is None else tf.identity(tf_variable)
            message = [to_transferable(value, strategy.collectives)]
            return tf.cast(strategy.collectives.broadcast(message, owner, name="optimizer/complete")[0], value.dtype)

        # As a concrete function, because TensorFlow warns about retracing if one line creates several functions.
        traced = tf.function(lambda: strategy.run(send), autograph=False).get_concrete_function()
        return strategy.local(traced())[0]


def optimizer_shards(shard: str, strategy: "Strategy") -> OptimizerShards:
    """Returns the shards for a value of `--shard`, `none` or `optimizer`."""
    return ShardedOptimizer(strategy) if shard == "optimizer" else OptimizerShards(strategy)
