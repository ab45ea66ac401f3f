"""The blocks of variables on a device mesh that a process reads and writes: those of its own devices."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfdist import keras_internals
from tfdist.distribution.dtensor import Devices
from tfdist.distribution.variable_adoption import VariableAdoption
from tfdist.distribution.variable_blocks import Read, Replicas, VariableBlocks
from tfdist.errors import InputError


class MeshBlocks(VariableBlocks):
    """Blocks of variables that are laid out on a mesh."""

    spans_processes = True

    def __init__(self, strategy: Replicas, devices: Devices):
        """Initializes the blocks.

        Args:
          strategy: the strategy.
          devices: its devices.
        """
        super().__init__(strategy)
        self._devices = devices

    def written(
        self, variable: tf.Variable, per_replica: bool, copied: bool = True
    ) -> list[tuple[tuple[int, ...], np.ndarray]]:
        """See base class; each block is saved by the process of the first device that has it."""
        blocks = self._devices.own_blocks(variable)
        return [((0, *offset), values[np.newaxis]) for offset, values in blocks] if per_replica else blocks

    def copies(self, variable: tf.Variable) -> list[tuple[str, tuple[int, ...], np.ndarray]]:
        """See base class; one copy per device."""
        return self._devices.copies(variable)

    def assign(self, variable: tf.Variable, per_replica: bool, read: Read) -> None:
        """See base class."""
        if not per_replica:
            self._devices.assign(variable, read)
            return
        self._devices.assign(variable, lambda offset, shape: read((0, *offset), (1, *shape))[0])

    def snapshot(self, variables: Sequence[tf.Variable]) -> Callable[[], None]:
        """See base class."""
        copies = [self._devices.copies(variable) for variable in variables]
        kept = [{offset: values.copy() for _, offset, values in blocks} for blocks in copies]

        def restore() -> None:
            for variable, blocks in zip(variables, kept, strict=True):
                self._devices.assign(variable, functools.partial(_block, blocks))

        return restore

    @contextlib.contextmanager
    def full_variables(self, variables: Sequence[keras.Variable]) -> Iterator[None]:
        """See base class."""
        spread = [keras_internals.value_of(variable) for variable in variables]
        try:
            for variable, value in zip(variables, spread, strict=True):
                whole = self._devices.full_tensor(value)
                if self._replicas.is_chief:
                    with tf.device("CPU:0"):
                        keras_internals.set_tf_variable(variable, tf.Variable(whole))
            yield
        finally:
            for variable, value in zip(variables, spread, strict=True):
                keras_internals.set_tf_variable(variable, value)


def _block(blocks: Mapping[tuple[int, ...], np.ndarray], offset: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
    return blocks[offset]


class MeshVariables(VariableAdoption):
    """Variables of a mesh, which must be created in the strategy's scope."""

    def __init__(
        self,
        synchronize: Callable[[Sequence[keras.Variable]], None],
        scope: Callable[[], contextlib.AbstractContextManager],
    ):
        """Initializes the adoption.

        Args:
          synchronize: see base class.
          scope: opens the strategy's scope.
        """
        super().__init__(synchronize)
        self._scope = scope

    def creation(self) -> contextlib.AbstractContextManager:
        """See base class."""
        return self._scope()

    def adopt(self, variables: Sequence[keras.Variable], optimizers: Sequence[keras.Optimizer] = ()) -> None:
        """See base class; replaces no variable."""
        strange = next((variable.path for variable in variables if not self.owns(variable)), None)
        if strange is not None:
            raise InputError(
                "On a mesh, a model must be created and compiled inside the strategy's scope. Received: "
                f"{strange}, created outside. Write `with strategy.scope():` around it."
            )

    def owns(self, variable: keras.Variable) -> bool:
        """See base class."""
        value = keras_internals.value_of(variable)
        return value is None or isinstance(value, dtensor.DVariable)
