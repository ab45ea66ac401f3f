"""The stages of a model that a process trains, and the full model on the chief, to save it."""

import contextlib
import functools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import Collectives
from tfdist.collectives.rows import gather_structure
from tfdist.coordination.group import LONG_SECONDS
from tfdist.distribution.dtensor_variables import is_spread
from tfdist.distribution.strategy import ModelParts, VariableBlocks, VariablesOfAll
from tfdist.errors import InputError
from tfdist.errors.formatting import count_of
from tfdist.pipelining.activation_compression import Link
from tfdist.pipelining.cutting import Cut, cut_model
from tfdist.pipelining.has_stages import HasStages
from tfdist.pipelining.operation_graph import Graph
from tfdist.pipelining.operation_timing import measure_seconds
from tfdist.pipelining.schedule_simulation import simulate
from tfdist.pipelining.spread_stage import OutputTensors
from tfdist.pipelining.stage_costs import crossing_specs, with_static_shapes
from tfdist.pipelining.staged_model import StagedModel, full_model


def summed_over_stages(
    gradients: Sequence[tf.Tensor],
    variables: Sequence[keras.Variable],
    cut: Cut,
    strategy: HasStages,
    collectives: Collectives,
) -> list[tf.Tensor]:
    """Returns the gradients of a process; of a shared variable, the sum over its stages, bitwise equal in each.

    The first process of a variable adds the gradients of the others in their order, and sends them the sum.

    Args:
      gradients: this process's gradients.
      variables: their variables.
      cut: how the model is cut.
      strategy: the strategy.
      collectives: collectives of the pipeline's processes.
    """
    results = list(gradients)
    indices = {id(variable): i for i, variable in enumerate(variables)}
    for number, (variable, stages) in enumerate(cut.shared):
        i, processes = indices.get(id(variable)), strategy.schedule.processes_of(stages)
        if i is not None and len(processes) > 1:
            results[i] = _sum(results[i], processes, strategy.pipeline_rank, collectives, f"shared/{number}")
    return results


def _sum(gradient: tf.Tensor, processes: Sequence[int], process: int, collectives: Collectives, tag: str) -> tf.Tensor:
    first, *others = processes
    spec = [tf.TensorSpec(gradient.shape, gradient.dtype)]
    if process != first:
        link = Link(collectives, first)
        link.send([gradient], f"{tag}/part")
        return link.receive(spec, f"{tag}/sum")[0]
    for other in others:
        gradient += Link(collectives, other).receive(spec, f"{tag}/part")[0]
    for other in others:
        Link(collectives, other).send([gradient], f"{tag}/sum")
    return gradient


def synchronize_replicas(strategy: HasStages, variables: Sequence[keras.Variable]) -> None:
    """Copies the first replica's values of a stage's floating-point variables to its other replicas."""
    floating = [variable for variable in variables if tf.as_dtype(variable.dtype).is_floating]
    if not floating or strategy.grid.replicas == 1:
        return

    def broadcast(values: list[tf.Tensor]) -> list[tf.Tensor]:
        return strategy.collectives.broadcast(values, name="stages/initial_values")

    with strategy.process_device():
        values = tf.function(broadcast, autograph=False)(strategy.full_values(floating))
    for variable, value in zip(floating, values, strict=True):
        variable.assign(value)


def synchronize_shared(strategy: HasStages, cut: Cut) -> None:
    """Copies the first stage's values of shared variables, such as tied embeddings, to the other stages that have them.

    Each pipeline copies its own values; `synchronize_replicas` then makes the values of all replicas equal.
    """
    for number, (variable, stages) in enumerate(cut.shared):
        first, *others = strategy.schedule.processes_of(stages)
        if strategy.pipeline_rank in (first, *others) and others:
            _copy(strategy, variable, first, others, f"shared/{number}/initial_value")


def _copy(strategy: HasStages, variable: keras.Variable, first: int, others: Sequence[int], tag: str) -> None:
    def exchange(values: list[tf.Tensor]) -> list[tf.Tensor]:
        if strategy.pipeline_rank != first:
            spec = tf.TensorSpec(variable.shape, variable.dtype)
            return Link(strategy.pipeline_collectives, first).receive([spec], tag)
        for other in others:
            Link(strategy.pipeline_collectives, other).send(values, tag)
        return []

    with strategy.process_device():
        received = tf.function(exchange, autograph=False)(strategy.full_values([variable]))
    for value in received:
        variable.assign(value)


_TRACED_ROWS = 32  # of a micro-batch, if the number of rows is unknown while tracing


def forward(strategy: HasStages, model: StagedModel, inputs: Any) -> Any:
    """Returns the outputs of a model, in a replica function; in processes without the last stage, zeros of their shapes.

    The rows flow through the stages as micro-batches of equal size. A stage computes a micro-batch while the stages after it
    compute earlier ones. The last micro-batch is filled with copies of the last row; if layers add losses, in which the
    copies would count, the remaining rows flow in micro-batches of one row instead.

    Losses that layers of this process add are added to the model, as means over the rows.

    Args:
      strategy: the strategy.
      model: this process's part of the model.
      inputs: inputs of the model, with any number of rows.
    """
    first = keras.tree.flatten(inputs)[0]
    rows = tf.shape(first)[0]
    size = _TRACED_ROWS if first.shape[0] is None else max(1, -(-first.shape[0] // strategy.micro_batches))
    if not model.cut.run.adds_losses:
        count = -(-rows // size)
        padded = keras.tree.map_structure(lambda x: _padded(x, count * size), inputs)
        return _forward(strategy, model, padded, rows, [_Part(tf.constant(0), count, size)])
    full = rows // size
    parts = [_Part(tf.constant(0), full, size), _Part(full * size, rows - full * size, 1)]
    return _forward(strategy, model, inputs, rows, parts)


class _Part(NamedTuple):
    """Rows that flow in micro-batches of one size.

    Attributes:
      start: scalar; the first row.
      count: scalar; number of micro-batches.
      size: rows of each.
    """

    start: tf.Tensor
    count: tf.Tensor
    size: int


def _forward(strategy: HasStages, model: StagedModel, inputs: Any, rows: tf.Tensor, parts: Sequence[_Part]) -> Any:
    outputs = _Outputs(model, inputs)
    outputs_by_part, losses = [], tf.zeros([], keras.config.floatx())
    for part in parts:
        arrays, part_losses = _micro_batches(strategy, model, inputs, part, outputs)
        outputs_by_part.append([array.concat() for array in arrays])
        losses += part_losses
    if model.cut.run.adds_losses:
        model.add_loss(tf.math.divide_no_nan(losses, tf.cast(rows, losses.dtype)))
    joined = [tf.concat(pieces, axis=0)[:rows] for pieces in zip(*outputs_by_part, strict=True)]
    return outputs.packed(joined or outputs.zeros(rows))


def _micro_batches(
    strategy: HasStages, model: StagedModel, inputs: Any, part: _Part, outputs: "_Outputs"
) -> tuple[list[tf.TensorArray], tf.Tensor]:
    """Returns the outputs of a part's micro-batches, and the sum over its rows of losses of layers of this process."""
    start, count, size = part
    specs = outputs.specs(size) if strategy.is_last else []
    arrays = [tf.TensorArray(spec.dtype, size=count, element_shape=spec.shape) for spec in specs]

    def body(number: tf.Tensor, arrays: list[tf.TensorArray], losses: tf.Tensor) -> Any:
        micro_batch = keras.tree.map_structure(lambda x: _rows(x, start + number * size, size), inputs)
        results, own_losses = _micro_batch(strategy, model, micro_batch, size)
        arrays = [array.write(number, x) for array, x in zip(arrays, outputs.tensors(results), strict=True)]
        return number + 1, arrays, losses + size * tf.add_n([tf.zeros_like(losses), *own_losses])

    _, arrays, losses = tf.while_loop(
        lambda number, *_: number < count,
        body,
        (tf.constant(0), arrays, tf.zeros([], keras.config.floatx())),
        parallel_iterations=1,
    )
    return arrays, losses


def _padded(x: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """Repeats the last row, which layers accept, unlike zeros or empty strings, which they may refuse."""
    return tf.gather(x, tf.minimum(tf.range(rows), tf.maximum(tf.shape(x)[0] - 1, 0)))


def _rows(x: tf.Tensor, start: tf.Tensor, size: int) -> tf.Tensor:
    return tf.ensure_shape(x[start : start + size], [size, *x.shape[1:]])


def _micro_batch(strategy: HasStages, model: StagedModel, inputs: Any, rows: int) -> tuple[Any, list[tf.Tensor]]:
    """Computes the stages of this process.

    Returns:
      The model's outputs if this process has the last stage, else None.
      Losses of its layers, as means over the rows.
    """
    local: list[tf.Tensor] = []  # between two stages of this process
    outputs, losses = None, []
    for number, stage in model.stages.items():
        before, after = (strategy.schedule.process_of(number + step) for step in (-1, 1))
        received = local
        if before != strategy.pipeline_rank and stage.received:
            specs = [crossing.spec for crossing in crossing_specs(stage.received, rows)]
            received = Link(strategy.pipeline_collectives, before).receive(specs, f"forward/{rows}/{number}")
        outputs, local = stage.call(model.cut.named_inputs(inputs), received, training=False)
        losses += [tf.cast(tf.reduce_sum(loss), keras.config.floatx()) for loss in stage.take_data_losses()]
        if after != strategy.pipeline_rank and stage.sent:
            local = with_static_shapes(local, crossing_specs(stage.sent, rows))
            Link(strategy.pipeline_collectives, after).send(local, f"forward/{rows}/{number + 1}")
    return outputs, losses


class _Outputs(OutputTensors):
    """The outputs of a model, whose shapes are known without computing them."""

    def __init__(self, model: StagedModel, inputs: Any):
        """Traces the model without computing anything.

        Args:
          model: the model.
          inputs: inputs of the model.
        """
        with keras_internals.new_trace().as_default():
            placeholders = keras.tree.map_structure(
                lambda x: tf.compat.v1.placeholder(x.dtype, [1, *x.shape[1:]]), inputs
            )
            outputs, _ = model.with_zeros(placeholders, training=False)
            super().__init__(outputs)
            self._of_one_row = [tf.TensorSpec(x.shape, x.dtype) for x in self.tensors(outputs)]

    def specs(self, rows: int) -> list[tf.TensorSpec]:
        """Returns the shapes and dtypes of the outputs for a number of rows."""
        return [tf.TensorSpec([rows, *spec.shape[1:]], spec.dtype) for spec in self._of_one_row]

    def zeros(self, rows: tf.Tensor) -> list[tf.Tensor]:
        """Returns zeros of the shapes of the outputs for a number of rows."""
        return [tf.zeros([rows, *spec.shape[1:]], spec.dtype) for spec in self._of_one_row]


_NEXT, _END = "save/next", -1


@contextlib.contextmanager
def read_full_model(strategy: HasStages, model: StagedModel) -> Iterator[keras.Model]:
    """Yields the model, whose weights the chief can read: the process of its stage sends each one when it is read.

    The chief does not keep the values, as it may not have the memory for the full model. Every process must enter the
    context. The processes of the first replica's other stages yield when the chief has left it.

    Args:
      strategy: the strategy.
      model: this process's part of the model.
    """
    if strategy.local_replicas.start != 0:
        yield model.full_model
        return
    reads = _RemoteReads(strategy, model)
    if strategy.pipeline_rank != 0:
        reads.answer()
        yield model.full_model
        return
    try:
        with keras_internals.read_by(reads.missing, reads.read):
            yield model.full_model
    finally:
        reads.end()


class _RemoteReads:
    """Reads of variables by the chief, which the processes of its pipeline answer.

    Attributes:
      missing: the variables that the chief does not have.
    """

    def __init__(self, strategy: HasStages, model: StagedModel):
        self._strategy = strategy
        self._group = strategy.group.subgroup(strategy.grid.ranks_of_replica(0))
        self._exchanges: dict[tuple[int, str], Any] = {}
        owners: dict[int, tuple[keras.Variable, int]] = {}
        for process in range(strategy.grid.stages):
            for number in strategy.schedule.stages_of(process):
                for variable in model.cut.stages[number].variables.all:
                    owners.setdefault(id(variable), (variable, process))
        self._owners = [(variable, process) for variable, process in owners.values() if process]
        # The states of random layers have values in every process; each step sets them.
        self._numbers = {
            id(variable): number
            for number, (variable, _) in enumerate(self._owners)
            if keras_internals.value_of(variable) is None
        }

    @property
    def missing(self) -> list[keras.Variable]:
        return [variable for variable, _ in self._owners if id(variable) in self._numbers]

    def read(self, variable: keras.Variable) -> tf.Tensor:
        """Returns the value of a variable of another stage; on the chief."""
        number = self._numbers[id(variable)]
        self._group.broadcast(_NEXT, number, LONG_SECONDS)
        with self._strategy.process_device():
            [value] = self._exchange(self._owners[number][1], variable)()
        return value

    def answer(self) -> None:
        """Sends this process's variables that the chief reads, until the chief has read all that it needs."""
        while (number := self._group.broadcast(_NEXT, None, LONG_SECONDS)) != _END:
            variable, process = self._owners[number]
            if process == self._strategy.pipeline_rank:
                with self._strategy.process_device():
                    self._exchange(0, variable)(tf.convert_to_tensor(keras_internals.value_of(variable)))

    def end(self) -> None:
        """Ends the answers of the other processes."""
        self._group.broadcast(_NEXT, _END, LONG_SECONDS)

    def _exchange(self, process: int, variable: keras.Variable) -> Any:
        """Returns a function that receives a variable's value from a process, or sends it to the chief; one for each shape."""
        shape, dtype = tuple(variable.shape), variable.dtype
        link = Link(self._strategy.pipeline_collectives, process)
        spec, tag = tf.TensorSpec(shape, dtype), f"save/{'x'.join(map(str, shape))}/{dtype}"
        if (process, tag) not in self._exchanges:
            specs = [] if self._strategy.pipeline_rank == 0 else [spec]

            def exchange(*values: tf.Tensor) -> list[tf.Tensor]:
                if not values:
                    return link.receive([spec], tag)
                link.send(values, tag)
                return []

            # A concrete function, because TensorFlow warns of retracing if one line makes several functions.
            self._exchanges[process, tag] = tf.function(exchange, autograph=False).get_concrete_function(*specs)
        return self._exchanges[process, tag]


def check_stages_of(model: keras.Model) -> None:
    """Raises `InputError` for a model whose variables have equal paths, or whose layers have metrics."""
    paths = [variable.path for variable in model.variables]
    twice = sorted({path for path in paths if paths.count(path) > 1})
    if twice:
        raise InputError(
            "The variables of a pipeline must have unique paths, by which checkpoints know them. Received twice: "
            f"{twice[0]}. Give the layers of nested models, and variables of your own, different names."
        )
    metrics = keras_internals.metrics_of_layers(model)
    if metrics:
        raise InputError(
            "Layers of a pipeline must not have metrics, as each stage would have others. Received: "
            f"{metrics[0].path}. Pass the metric to `metrics=`."
        )


def refuse_training_without_trainer() -> None:
    """Makes Keras's own `fit` raise `InputError` for a model of a pipeline to which no trainer has given values."""
    keras_internals.refuse_training(
        "A model of a pipeline is trained by tfdist.Trainer, which gives each process the weights of its stages. Received: "
        "Keras's own fit or train_on_batch, and {path}, which has no value yet. Pass the model and what it is compiled with to "
        "tfdist.Trainer, and call the trainer's fit."
    )


class StageBlocks(VariableBlocks):
    """Variables of this process's stages; of those with the same stage, the first replica writes them."""

    spans_processes = True
    _strategy: HasStages

    @property
    def _writes_same(self) -> bool:
        """See base class."""
        return self._strategy.local_replicas.start == 0

    def written(
        self, variable: tf.Variable, per_replica: bool, copied: bool = True
    ) -> list[tuple[tuple[int, ...], np.ndarray]]:
        """See base class; the value of a variable on several devices is copied to be put together."""
        return super().written(variable, per_replica, copied or is_spread(variable))

    def of_all(self, forms: Mapping[str, Any]) -> VariablesOfAll:
        """See base class; in the order of the stages.

        Variables that several stages have, such as tied weights and the optimizer's step, are written by the first of them.
        """
        forms_by_process = self._strategy.group.gather("stages/forms", dict(forms), LONG_SECONDS)
        all_forms: dict[str, Any] = {}
        for each in forms_by_process:
            all_forms |= {name: form for name, form in each.items() if name not in all_forms}
        earlier = forms_by_process[: self._strategy.grid.ranks_of_stage(self._strategy.pipeline_rank)[0]]
        return VariablesOfAll(all_forms, frozenset(forms).difference(*earlier))


_log = logging.getLogger(__name__)
_ROWS = 8  # of the micro-batch with which calls are measured: the batch size is not known yet


class StageParts(ModelParts):
    """The stages of this process; the last stage computes the outputs."""

    def __init__(self, strategy: HasStages):
        """Initializes the parts.

        Args:
          strategy: the strategy.
        """
        super().__init__(strategy.blocks.full_variables)
        self._strategy = strategy
        self.computes_outputs = strategy.is_last

    def trained(self, model: keras.Model) -> StagedModel:
        """See base class."""
        strategy, schedule = self._strategy, self._strategy.schedule
        model = full_model(model)  # of a stage of another trainer
        check_stages_of(model)
        cut = cut_model(model, strategy.cut, schedule.stages, seconds=self._measured)
        with strategy.raise_on_all_members("stages"), strategy.process_device():
            part = StagedModel(
                model,
                cut,
                schedule.stages_of(strategy.pipeline_rank),
                functools.partial(forward, strategy),
                strategy.stage_devices,
            )
        synchronize_shared(strategy, cut)
        if strategy.is_chief and strategy.stage_devices is not None:
            for line in strategy.stage_devices.idle(model):
                _log.warning("%s", line)
        return part

    def _measured(self, graph: Graph) -> list[float]:
        """Returns the seconds of each call, as measured on rank 0: all processes must cut alike."""
        own = measure_seconds(graph, rows=_ROWS) if self._strategy.cluster.rank == 0 else None
        seconds: list[float] = self._strategy.group.broadcast("stages/seconds", own, LONG_SECONDS)
        return seconds

    def description(self, part: keras.Model) -> str:
        """Returns for example `2, of 416 + 21,258 parameters; 1f1b with 4 micro-batches, 20% of the time idle if ...`."""
        assert isinstance(part, StagedModel)
        counts = [sum(math.prod(variable.shape) for variable in stage.variables.all) for stage in part.cut.stages]
        schedule = self._strategy.schedule
        if schedule.has_flush:
            idle = simulate(schedule, forward=1.0, backward=2.0).bubble
            cost = f"{idle:.0%} of the time idle if stages take equally long"
        else:
            cost = f"gradients of weights {'/'.join(map(str, schedule.delays))} updates old"
        named = f"{schedule.name} with {count_of(schedule.micro_batches, 'micro-batch')}"
        return f"{len(counts)}, of {' + '.join(f'{count:,}' for count in counts)} parameters; {named}, {cost}"

    @contextlib.contextmanager
    def full_model(self, part: keras.Model) -> Iterator[keras.Model]:
        """See base class."""
        assert isinstance(part, StagedModel)
        devices = self._strategy.stage_devices
        on_host = contextlib.nullcontext() if devices is None else devices.values_on_host(part.variables)
        with on_host, read_full_model(self._strategy, part) as model:
            yield model

    def regularization(self, part: keras.Model) -> float:
        """See base class; a shared variable counts once."""
        assert isinstance(part, StagedModel)
        own = sum(float(tf.reduce_sum(loss)) for stage in part.stages.values() for loss in stage.weight_losses())
        by_process = self._strategy.group.gather("stages/regularization", own, LONG_SECONDS)
        return math.fsum(by_process[:: self._strategy.grid.replicas])

    def outputs(self, outputs: Any) -> Any:
        """See base class; sent by the last stage to all others."""
        own = tf.nest.map_structure(lambda output: output if self.computes_outputs else output[:0], outputs)
        return gather_structure(own, self._strategy.pipeline_collectives)
