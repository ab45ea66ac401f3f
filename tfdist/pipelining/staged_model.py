"""`StagedModel`, the part of a model that one process of a pipeline trains, and the staleness of its weights."""

import functools
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.distribution.strategy import Strategy, in_replica_function
from tfdist.errors import InputError
from tfdist.pipelining.cutting import Cut, StageGraph, initialize
from tfdist.pipelining.has_stages import HasStages, pipeline_of
from tfdist.pipelining.spread_stage import SpreadStage
from tfdist.pipelining.stage_devices import StageDevices

_RULE = "A process of a pipeline has the weights of its own stages only."
_REMEDY = "Use the trainer's fit, predict, evaluate and save, which all processes call."
_NEEDS_ALL_WEIGHTS = "fit evaluate predict train_on_batch test_on_batch predict_on_batch".split()


def _error_message(received: str) -> str:
    return f"{_RULE} Received: {received}. {_REMEDY}"


def _raise_input_error(received: str, *_: Any, **__: Any) -> NoReturn:
    raise InputError(_error_message(received))


class StagedModel(keras.Model):
    """The stages of one process as a Keras model with only their variables, for the optimizer and for checkpoints."""

    def __init__(
        self,
        model: keras.Model,
        cut: Cut,
        indices: Sequence[int],
        forward: Callable[["StagedModel", Any], Any],
        devices: StageDevices | None = None,
    ):
        """Initializes the variables of the stages of this process, whose `indices` are given.

        `forward` computes the outputs of the full model from its inputs, in a replica function of a pipeline. `devices` are
        the devices over which the stages are spread; None for a single device.
        """
        super().__init__(name=model.name)
        # In functions, because Keras would otherwise track the layers of these objects as layers of this model.
        self._full_model: Callable[[], keras.Model] = lambda: model
        self.cut, self._forward = cut, forward
        stages: dict[int, StageGraph | SpreadStage] = {
            index: cut.stages[index] if devices is None else SpreadStage(cut.stages[index], devices)
            for index in indices
        }
        self._stages = lambda: stages
        self._stage_layers = list(dict.fromkeys(layer for stage in self.stages.values() for layer in stage.layers))
        for stage in self.stages.values():
            if devices is not None:
                devices.set_layouts(model, stage.variables.all)
            initialize(stage.variables)
        # An earlier trainer may have created variables of layers that were frozen then.
        keras_internals.watch_copies([keras_internals.value_of(variable) for variable in self.trainable_variables])
        keras_internals.reject_reads(model.variables, _error_message("a read of a weight of another stage"))
        has_all = all(keras_internals.value_of(variable) is not None for variable in model.variables)
        for name in (*_NEEDS_ALL_WEIGHTS, "save"):
            setattr(self, name, functools.partial(_raise_input_error, f"a call to {name} of the trainer's model"))
        for name in () if has_all else _NEEDS_ALL_WEIGHTS:
            setattr(model, name, functools.partial(_raise_input_error, f"a call to {name} of the model"))
        if hasattr(model, "output_names"):  # sequential models have none
            self.output_names = model.output_names
        self.built = True

    @property
    def full_model(self) -> keras.Model:
        """The full model; weights of other stages have no values."""
        return self._full_model()

    @property
    def stages(self) -> Mapping[int, StageGraph | SpreadStage]:
        """The stages of this process, by index."""
        return self._stages()

    @property
    def variables(self) -> list[keras.Variable]:
        """This process's variables in the order of the full model, including variables that other stages share."""
        variable_ids = {id(variable) for stage in self.stages.values() for variable in stage.variables.all}
        return [variable for variable in self.full_model.variables if id(variable) in variable_ids]

    weights = variables

    def load_weights(self, filepath: str | os.PathLike[str], **kwargs: Any) -> None:
        """Loads the weights of this process's stages from a file of an equal full model."""
        self.full_model.load_weights(filepath, **kwargs)

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Returns the outputs of the full model; zeros in a process without the last stage."""
        if in_replica_function():
            return self._forward(self, inputs)
        if not keras_internals.is_symbolic_call():
            raise keras_internals.without_call_context(InputError(_error_message("a call of the trainer's model")))
        return self.call_with_zero_weights(inputs, training)[0]  # for shapes and dtypes only

    def call_with_zero_weights(self, inputs: Any, training: bool | None = None) -> tuple[Any, list[tf.Tensor]]:
        """Calls the full model with zeros as weights, for the specs and masks of its outputs; returns outputs and zeros."""
        placeholders = [tf.zeros(variable.shape, variable.dtype) for variable in self.full_model.variables]
        with keras.StatelessScope(state_mapping=list(zip(self.full_model.variables, placeholders, strict=True))):
            return self.full_model(inputs, training=training), placeholders


def full_model(model: keras.Model) -> keras.Model:
    """Returns the full model of a `StagedModel`; any other model unchanged."""
    return model.full_model if isinstance(model, StagedModel) else model


def pipeline_without_flush(strategy: Strategy) -> HasStages | None:
    """Returns the strategy if it is a pipeline that does not flush at the end of each step, else None."""
    pipeline = pipeline_of(strategy)
    return pipeline if pipeline and not pipeline.schedule.has_flush else None


def staleness(strategy: Strategy, model: keras.Model, step: int) -> dict[str, float]:
    """Returns the field `staleness` of a record after `step` updates; empty if all gradients use the newest weights."""
    pipeline = pipeline_without_flush(strategy)
    if not pipeline:
        return {}
    assert isinstance(model, StagedModel)
    sizes = [sum(v.shape.num_elements() for v in stage.variables.trainable) for stage in model.cut.stages]
    ages = [min(delay, step - 1) for delay in pipeline.schedule.delays]
    return {"staleness": sum(map(operator.mul, sizes, ages)) / sum(sizes)}
