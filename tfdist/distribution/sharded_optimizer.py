"""Divides the optimizer's state among replicas, each of which updates the weights whose state it has.

This is stage 1 of ZeRO (Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models,
arXiv:1910.02054). With weights w of which replica r owns w_r, slots s_r, and gradients g that are summed over replicas as
usual:

    w_r, s_r = update(w_r, s_r, g_r)        on replica r
    w = all_gather(w_r)

A part consists of whole variables, as in PyTorch's `ZeroRedundancyOptimizer`, so updates that are not elementwise (LARS, LAMB,
Muon, Adafactor) do not change. Everything before the update sees all gradients, so results are bitwise equal to those without
sharding. Memory: 1/N of the slots, if no variable is larger than that. Cost: each step receives P (N - 1) / N elements in
addition to the all-reduce of gradients, for P parameters and N replicas.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives.interface import to_transferable
from tfdist.distribution.balanced_parts import balanced_owners, exchanges
from tfdist.distribution.strategy import OptimizerShards, Variables
from tfdist.errors import InputError

if TYPE_CHECKING:
    from tfdist.distribution.strategy import Strategy

_MIN_MESSAGE_BYTES = 2**22  # small variables share a message


class ShardedOptimizer(OptimizerShards):
    """The optimizer's state, divided among replicas by trained variable, with one replica per process."""

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
                f"{len(strategy.local_replicas)} replicas in this process. Start one process per device."
            )
        self.parts, self._rank = strategy.replicas, strategy.local_replicas.start
        self._owners: dict[int, int] = {}  # by the id of a trained variable, or of a variable of the optimizer

    def deferred_build(self, model: keras.Model) -> contextlib.AbstractContextManager:
        return keras_internals.patched((model, "optimizer", None))

    def build(self, model: keras.Model) -> None:
        """See base class. Every process computes the same owners without communication.

        Raises:
          InputError: there are fewer trained variables than replicas.
        """
        variables = list(model.trainable_variables)
        owners = balanced_owners([keras_internals.bytes_of(variable) for variable in variables], self.parts)
        local_indices = {index for index, owner in enumerate(owners) if owner == self._rank}
        with self._strategy.process_device():
            slots = keras_internals.build_partially(model.optimizer, variables, local_indices)
        self._owners = {id(variable): owner for variable, owner in zip(variables, owners, strict=True)}
        self._owners |= {slot: owners[index] for slot, index in slots.items()}

    def apply(self, optimizer: keras.Optimizer, gradients: Sequence[tf.Tensor], variables: Variables) -> None:
        """See base class. Updates the weights whose optimizer state this replica owns."""
        local_variables = [variable for variable in variables if self.is_local_only(variable)]
        with (
            keras_internals.averaging_subset(optimizer, local_variables),
            keras_internals.updating_subset(optimizer, local_variables),
        ):
            super().apply(optimizer, gradients, variables)

    def exchange(self, variables: Sequence[keras.Variable]) -> None:
        """See base class. The owner of a variable sends it to all replicas."""
        values = [tf.identity(keras_internals.value_of(variable)) for variable in variables]
        new_values = self.gather_from_owners(variables, values, "updated")
        remote_indices = [i for i, variable in enumerate(variables) if not self.is_local_only(variable)]
        with self._strategy.own_copies([variables[i] for i in remote_indices]):
            for i in remote_indices:
                keras_internals.value_of(variables[i]).assign(new_values[i])

    def state_bytes(self, optimizer: keras.Optimizer) -> list[int]:
        """See base class. Variables that every replica has are counted in each part."""
        bytes_by_owner = [
            (self._owners.get(id(variable)), keras_internals.bytes_of(variable)) for variable in optimizer.variables
        ]
        return [sum(count for owner, count in bytes_by_owner if owner in (None, part)) for part in range(self.parts)]

    def is_local_only(self, variable: keras.Variable) -> bool:
        """See base class. For a trained variable, returns whether this replica updates it."""
        return self._owners.get(id(variable)) == self._rank

    def is_on_all_replicas(self, variable: keras.Variable) -> bool:
        return id(variable) not in self._owners

    def gather_from_owners(self, variables: Variables, values: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """See base class; each message is a vector of several variables per owner."""
        results, owners = dict(enumerate(values)), [self._owners[id(variable)] for variable in variables]
        for dtype in dict.fromkeys(value.dtype for value in values):
            sizes = {i: value.shape.num_elements() for i, value in enumerate(values) if value.dtype == dtype}
            plan = exchanges(sizes, owners, self.parts, _MIN_MESSAGE_BYTES // dtype.size)
            for number, members in enumerate(plan):
                results |= self._exchange_vectors(members, values, f"optimizer/{name}/{dtype.name}/{number}")
        return list(results.values())

    def _exchange_vectors(
        self, members: list[list[int]], values: Sequence[tf.Tensor], name: str
    ) -> dict[int, tf.Tensor]:
        """Returns the values of other owners' variables in an exchange, by index; `members` has the indices by owner."""
        collectives, dtype = self._strategy.collectives, values[max(members, key=len)[0]].dtype
        sizes = [[values[i].shape.num_elements() for i in numbers] for numbers in members]
        padding = max(map(sum, sizes)) - sum(sizes[self._rank])
        vectors = [tf.reshape(values[i], [-1]) for i in members[self._rank]]
        vector = tf.concat([*vectors, tf.zeros([padding], dtype)], 0)
        [stack] = collectives.stack([to_transferable(vector, collectives)], name=name)
        remote_values: dict[int, tf.Tensor] = {}
        for owner, numbers in enumerate(members):
            if numbers and owner != self._rank:
                parts = tf.split(stack[owner, : sum(sizes[owner])], sizes[owner])
                remote_values |= {
                    i: tf.cast(tf.reshape(x, values[i].shape), dtype) for i, x in zip(numbers, parts, strict=True)
                }
        return remote_values

    @contextlib.contextmanager
    def complete(self, variables: Sequence[keras.Variable]) -> Iterator[None]:
        """See base class. Broadcasts one variable at a time, and only the chief keeps the values."""
        values: dict[int, tf.Tensor] = {}
        remote_variables: list[keras.Variable] = []
        for variable in variables:
            owner = self._owners.get(id(variable), 0)
            is_slot = not variable.trainable and id(variable) in self._owners
            if is_slot and owner:
                value = self._broadcast_from(owner, variable)
                if self._rank == 0:
                    remote_variables.append(variable)
                    values[id(variable)] = value
        with keras_internals.replace_reads(remote_variables, lambda variable: values[id(variable)]):
            yield

    def _broadcast_from(self, owner: int, variable: keras.Variable) -> tf.Tensor:
        strategy = self._strategy

        def send() -> tf.Tensor:
            tf_variable = keras_internals.value_of(variable)
            value = tf.zeros(variable.shape, variable.dtype) if tf_variable is None else tf.identity(tf_variable)
            message = [to_transferable(value, strategy.collectives)]
            return tf.cast(strategy.collectives.broadcast(message, owner, name="optimizer/complete")[0], value.dtype)

        # TensorFlow would warn about retracing if one line created several functions that are not concrete.
        broadcast = tf.function(lambda: strategy.run(send), autograph=False).get_concrete_function()
        return strategy.local(broadcast())[0]


def optimizer_shards(shard: str, strategy: "Strategy") -> OptimizerShards:
    """Returns the optimizer's shards for `shard`, the value `none` or `optimizer` of `--shard`."""
    return ShardedOptimizer(strategy) if shard == "optimizer" else OptimizerShards(strategy)
