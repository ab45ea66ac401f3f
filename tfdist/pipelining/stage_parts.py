"""The stages of a model that a process trains, and the full model on the chief, for saving."""

import contextlib
import functools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import Collectives
from tfdist.collectives.rows import gather_structure
from tfdist.coordination.group import LONG_SECONDS
from tfdist.distribution.dtensor_variables import is_mesh_variable
from tfdist.distribution.strategy import JobVariables, ModelParts, VariableBlocks
from tfdist.errors import InputError, count_of
from tfdist.pipelining.activation_compression import Link
from tfdist.pipelining.cutting import Cut, cut_model
from tfdist.pipelining.has_stages import HasStages
from tfdist.pipelining.operation_graph import Graph
from tfdist.pipelining.operation_timing import measure_seconds
from tfdist.pipelining.spread_stage import OutputTensors
from tfdist.pipelining.stage_costs import crossing_specs, with_static_shapes
from tfdist.pipelining.staged_model import StagedModel, full_model
from tfdist.pipelining.timeline import simulate


def sum_over_stages(
    gradients: Sequence[tf.Tensor],
    variables: Sequence[keras.Variable],
    cut: Cut,
    strategy: HasStages,
    collectives: Collectives,
) -> list[tf.Tensor]:
    """Returns the gradients, with those of shared variables summed over stages and bitwise equal in each stage.

    The first process of a variable adds the gradients of the other processes in order, and sends the sum to them, through the
    collectives of the pipeline's processes.
    """
    results = list(gradients)
    indices = {id(variable): i for i, variable in enumerate(variables)}
    for index, (variable, stages) in enumerate(cut.shared):
        i, processes = indices.get(id(variable)), strategy.schedule.processes_of(stages)
        if i is not None and len(processes) > 1:
            results[i] = _sum_gradient(results[i], processes, strategy.pipeline_rank, collectives, f"shared/{index}")
    return results


def _sum_gradient(
    gradient: tf.Tensor, processes: Sequence[int], process: int, collectives: Collectives, tag: str
) -> tf.Tensor:
    spec = tf.TensorSpec(gradient.shape, gradient.dtype)
    if process != processes[0]:
        Link(collectives, processes[0]).send([gradient], f"{tag}/part")
    else:
        for peer in processes[1:]:
            gradient += Link(collectives, peer).receive([spec], f"{tag}/part")[0]
    return _copy_from_first(gradient, spec, processes, process, collectives, f"{tag}/sum")


def _copy_from_first(
    value: Any, spec: tf.TensorSpec, processes: Sequence[int], process: int, collectives: Collectives, tag: str
) -> tf.Tensor:
    """Returns the first process's value, which it sends to the others."""
    if process != processes[0]:
        return Link(collectives, processes[0]).receive([spec], tag)[0]
    for peer in processes[1:]:
        Link(collectives, peer).send([value], tag)
    return value


def synchronize_replicas(strategy: HasStages, variables: Sequence[keras.Variable]) -> None:
    """Copies the first replica's values of a stage's floating-point variables to its other replicas."""
    floating_variables = [variable for variable in variables if tf.as_dtype(variable.dtype).is_floating]
    if not floating_variables or strategy.grid.replicas == 1:
        return

    def broadcast(values: list[tf.Tensor]) -> list[tf.Tensor]:
        return strategy.collectives.broadcast(values, name="stages/initial_values")

    with strategy.process_device():
        values = tf.function(broadcast, autograph=False)(strategy.full_values(floating_variables))
    for variable, value in zip(floating_variables, values, strict=True):
        variable.assign(value)


def synchronize_shared(strategy: HasStages, cut: Cut) -> None:
    """Copies the values of shared variables from their first stage to their other stages, within each pipeline."""
    for index, (variable, stages) in enumerate(cut.shared):
        processes = strategy.schedule.processes_of(stages)
        if strategy.pipeline_rank in processes and len(processes) > 1:
            _copy_variable(strategy, variable, processes, f"shared/{index}/initial_value")


def _copy_variable(strategy: HasStages, variable: keras.Variable, processes: Sequence[int], tag: str) -> None:
    spec, rank = tf.TensorSpec(variable.shape, variable.dtype), strategy.pipeline_rank
    arguments = spec, processes, rank, strategy.pipeline_collectives, tag
    with strategy.process_device():
        copy = tf.function(lambda value: _copy_from_first(value, *arguments), autograph=False)
        value = copy(*strategy.full_values([variable]))
    if rank != processes[0]:
        variable.assign(value)


_TRACED_ROWS = 32  # rows of a micro-batch if the batch size is unknown during tracing


def forward(strategy: HasStages, model: StagedModel, inputs: Any) -> Any:
    """Returns the outputs of a model, in a replica function; processes without the last stage return zeros.

    The rows flow through the stages in micro-batches of equal size. Copies of the last row pad the last micro-batch. If layers
    add losses, which would include the padding, the remaining rows flow in micro-batches of one row instead.

    The losses that layers of this process add are added to the model, as means over the rows.
    """
    first = keras.tree.flatten(inputs)[0]
    rows = tf.shape(first)[0]
    size = _TRACED_ROWS if first.shape[0] is None else max(1, -(-first.shape[0] // strategy.micro_batches))
    count = rows // size if model.cut.run.adds_losses else -(-rows // size)
    parts = [(tf.constant(0), count, size)]
    if model.cut.run.adds_losses:
        parts.append((count * size, rows - count * size, 1))
    else:  # copies of the last row, because layers may reject zeros or empty strings
        indices = tf.minimum(tf.range(count * size), tf.maximum(rows - 1, 0))
        inputs = keras.tree.map_structure(lambda x: tf.gather(x, indices), inputs)
    outputs = _Outputs(model, inputs)
    outputs_by_part, losses = [], tf.zeros([], keras.config.floatx())
    for part in parts:
        arrays, part_losses = _micro_batches(strategy, model, inputs, part, outputs)
        outputs_by_part.append([array.concat() for array in arrays])
        losses += part_losses
    if model.cut.run.adds_losses:
        model.add_loss(tf.math.divide_no_nan(losses, tf.cast(rows, losses.dtype)))
    full_outputs = [tf.concat(pieces, axis=0)[:rows] for pieces in zip(*outputs_by_part, strict=True)]
    return outputs.pack(full_outputs or outputs.zeros(rows))


def _micro_batches(
    strategy: HasStages, model: StagedModel, inputs: Any, part: tuple[tf.Tensor, tf.Tensor, int], outputs: "_Outputs"
) -> tuple[list[tf.TensorArray], tf.Tensor]:
    """Returns the outputs of the micro-batches, and the sum of the losses of this process's layers over their rows.

    `part` has the first row, the number of micro-batches, and their size.
    """
    start, count, size = part
    specs = outputs.specs(size) if strategy.is_last else []
    arrays = [tf.TensorArray(spec.dtype, size=count, element_shape=spec.shape) for spec in specs]

    def body(index: tf.Tensor, arrays: list[tf.TensorArray], losses: tf.Tensor) -> Any:
        rows = slice(start + index * size, start + (index + 1) * size)
        micro_batch = keras.tree.map_structure(lambda x: tf.ensure_shape(x[rows], [size, *x.shape[1:]]), inputs)
        results, local_losses = _micro_batch(strategy, model, micro_batch, size)
        arrays = [array.write(index, x) for array, x in zip(arrays, outputs.tensors(results), strict=True)]
        return index + 1, arrays, losses + size * tf.add_n([tf.zeros_like(losses), *local_losses])

    _, arrays, losses = tf.while_loop(
        lambda index, *_: index < count,
        body,
        (tf.constant(0), arrays, tf.zeros([], keras.config.floatx())),
        parallel_iterations=1,
    )
    return arrays, losses


def _micro_batch(strategy: HasStages, model: StagedModel, inputs: Any, rows: int) -> tuple[Any, list[tf.Tensor]]:
    """Returns the outputs of the model, or None without the last stage, and the losses of layers as means over rows."""
    tensors: list[tf.Tensor] = []  # from one stage of this process to the next
    outputs, losses = None, []
    for index, stage in model.stages.items():
        previous_process, next_process = (strategy.schedule.process_of(index + step) for step in (-1, 1))
        if previous_process != strategy.pipeline_rank:
            specs = [crossing.spec for crossing in crossing_specs(stage.received, rows)]
            link = Link(strategy.pipeline_collectives, previous_process)
            tensors = link.receive(specs, f"forward/{rows}/{index}")
        outputs, tensors = stage.call(model.cut.named_inputs(inputs), tensors, training=False)
        losses += [tf.cast(tf.reduce_sum(loss), keras.config.floatx()) for loss in stage.take_data_losses()]
        if next_process != strategy.pipeline_rank:
            tensors = with_static_shapes(tensors, crossing_specs(stage.sent, rows))
            Link(strategy.pipeline_collectives, next_process).send(tensors, f"forward/{rows}/{index + 1}")
    return outputs, losses


class _Outputs(OutputTensors):
    """The structure, shapes and dtypes of a model's outputs, from a trace that computes nothing."""

    def __init__(self, model: StagedModel, inputs: Any):
        with keras_internals.new_trace().as_default():
            row = keras.tree.map_structure(lambda x: tf.compat.v1.placeholder(x.dtype, [1, *x.shape[1:]]), inputs)
            outputs, _ = model.call_with_zero_weights(row, training=False)
            super().__init__(outputs)
            self._row_specs = [tf.TensorSpec(x.shape, x.dtype) for x in self.tensors(outputs)]

    def specs(self, rows: int) -> list[tf.TensorSpec]:
        return [tf.TensorSpec([rows, *spec.shape[1:]], spec.dtype) for spec in self._row_specs]

    def zeros(self, rows: tf.Tensor) -> list[tf.Tensor]:
        return [tf.zeros([rows, *spec.shape[1:]], spec.dtype) for spec in self._row_specs]


_NEXT_READ, _END = "save/next", -1  # message of the index of the variable to read next, and its last value


class _RemoteReads:
    """Reads variables of other stages on the chief; the processes of its pipeline answer."""

    def __init__(self, strategy: HasStages, model: StagedModel):
        self._strategy = strategy
        self._group = strategy.group.subgroup(strategy.grid.ranks_of_replica(0))
        self._transfers: dict[tuple[int, str], Any] = {}
        owners: dict[int, tuple[keras.Variable, int]] = {}
        for process in range(strategy.grid.stages):
            for stage in strategy.schedule.stages_of(process):
                for variable in model.cut.stages[stage].variables.all:
                    owners.setdefault(id(variable), (variable, process))
        self._owners = [(variable, process) for variable, process in owners.values() if process]
        # States of random layers have values in every process: each step sets them.
        self.missing_variables = [v for v, _ in self._owners if keras_internals.value_of(v) is None]  # on the chief
        self._indices = {id(variable): index for index, (variable, _) in enumerate(self._owners)}

    def read(self, variable: keras.Variable) -> tf.Tensor:
        """Returns the value of a variable of another stage; only the chief calls it."""
        index = self._indices[id(variable)]
        self._group.broadcast(_NEXT_READ, index, LONG_SECONDS)
        with self._strategy.process_device():
            [value] = self._transfer(self._owners[index][1], variable)()
        return value

    def answer(self) -> None:
        """Sends this process's variables when the chief reads them, until it calls `end`."""
        while (index := self._group.broadcast(_NEXT_READ, None, LONG_SECONDS)) != _END:
            variable, owner = self._owners[index]
            if owner == self._strategy.pipeline_rank:
                with self._strategy.process_device():
                    self._transfer(0, variable)(tf.convert_to_tensor(keras_internals.value_of(variable)))

    def end(self) -> None:
        self._group.broadcast(_NEXT_READ, _END, LONG_SECONDS)

    def _transfer(self, process: int, variable: keras.Variable) -> Any:
        """Returns a function, cached by shape, that receives a value from a process or sends it to the chief."""
        shape, dtype = tuple(variable.shape), variable.dtype
        link = Link(self._strategy.pipeline_collectives, process)
        spec, tag = tf.TensorSpec(shape, dtype), f"save/{'x'.join(map(str, shape))}/{dtype}"
        if (process, tag) not in self._transfers:
            specs = [] if self._strategy.pipeline_rank == 0 else [spec]

            def transfer(*values: tf.Tensor) -> list[tf.Tensor]:
                if not values:
                    return link.receive([spec], tag)
                link.send(values, tag)
                return []

            # TensorFlow would warn about retracing if one line created several functions that are not concrete.
            self._transfers[process, tag] = tf.function(transfer, autograph=False).get_concrete_function(*specs)
        return self._transfers[process, tag]


def check_stage_model(model: keras.Model) -> None:
    """Raises `InputError` for a model whose variables have equal paths, or whose layers have metrics."""
    paths = [variable.path for variable in model.variables]
    duplicates = sorted({path for path in paths if paths.count(path) > 1})
    if duplicates:
        raise InputError(
            "The variables of a pipeline must have unique paths, by which checkpoints identify them. Received twice: "
            f"{duplicates[0]}. Use different names for layers of nested models and for your own variables."
        )
    metrics = keras_internals.metrics_of_layers(model)
    if metrics:
        raise InputError(
            "Layers of a pipeline must not have metrics, because no stage has those of all layers. Received: "
            f"{metrics[0].path}. Pass the metric to `metrics=`."
        )


class StageBlocks(VariableBlocks):
    """Variables of this process's stages; the first replica writes them."""

    spans_processes = True
    _strategy: HasStages

    @property
    def _writes_replicated(self) -> bool:
        return self._strategy.local_replicas.start == 0

    def saved_blocks(
        self, variable: tf.Variable, per_replica: bool, copied: bool = True
    ) -> list[tuple[tuple[int, ...], np.ndarray]]:
        """See base class. Values on several devices are always copied."""
        return super().saved_blocks(variable, per_replica, copied or is_mesh_variable(variable))

    def job_variables(self, forms: Mapping[str, Any]) -> JobVariables:
        """See base class. The variables are in the order of stages.

        A variable that several stages have, such as tied weights or the optimizer's step, is written by the first of them.
        """
        forms_by_process = self._strategy.group.gather("stages/forms", dict(forms), LONG_SECONDS)
        all_forms: dict[str, Any] = {}
        for process_forms in forms_by_process:
            all_forms |= {name: form for name, form in process_forms.items() if name not in all_forms}
        earlier_forms = forms_by_process[: self._strategy.grid.ranks_of_stage(self._strategy.pipeline_rank)[0]]
        return JobVariables(all_forms, frozenset(forms).difference(*earlier_forms))


_log = logging.getLogger(__name__)
_MEASURED_ROWS = 8  # rows of a measured micro-batch; the batch size is not known yet


class StageParts(ModelParts):
    """The stages of this process. The last stage computes the outputs."""

    _strategy: HasStages

    def __init__(self, strategy: HasStages):
        super().__init__(strategy)
        self.computes_outputs = strategy.is_last

    def local_part(self, model: keras.Model) -> StagedModel:
        strategy, schedule = self._strategy, self._strategy.schedule
        model = full_model(model)  # it may be the part of another trainer
        check_stage_model(model)
        cut = cut_model(model, strategy.cut, schedule.stages, seconds=self._measure_seconds)
        with strategy.raise_on_all_members("stages"), strategy.process_device():
            staged_model = StagedModel(
                model,
                cut,
                schedule.stages_of(strategy.pipeline_rank),
                functools.partial(forward, strategy),
                strategy.stage_devices,
            )
        synchronize_shared(strategy, cut)
        if strategy.is_chief and strategy.stage_devices is not None:
            for warning in strategy.stage_devices.layout_warnings(model):
                _log.warning("%s", warning)
        return staged_model

    def _measure_seconds(self, graph: Graph) -> list[float]:
        """Returns the seconds of each call, measured on rank 0, because all processes must cut equally."""
        local_seconds = measure_seconds(graph, rows=_MEASURED_ROWS) if self._strategy.cluster.rank == 0 else None
        return self._strategy.group.broadcast("stages/seconds", local_seconds, LONG_SECONDS)

    def description(self, part: Any) -> str:
        """Returns, for example, `2, of 416 + 21,258 parameters; 1f1b with 4 micro-batches, 20% of the time idle if ...`."""
        counts = [sum(math.prod(variable.shape) for variable in stage.variables.all) for stage in part.cut.stages]
        schedule = self._strategy.schedule
        if schedule.has_flush:
            bubble = simulate(schedule, forward=1.0, backward=2.0).bubble
            cost = f"{bubble:.0%} of the time idle if stages take equally long"
        else:
            cost = f"gradients of weights {'/'.join(map(str, schedule.delays))} updates old"
        schedule_text = f"{schedule.name} with {count_of(schedule.micro_batches, 'micro-batch')}"
        return f"{len(counts)}, of {' + '.join(f'{count:,}' for count in counts)} parameters; {schedule_text}, {cost}"

    @contextlib.contextmanager
    def full_model(self, part: Any) -> Iterator[keras.Model]:
        """See base class. Other stages of the first replica send the chief a weight when it is read.

        The chief does not keep the values, because the full model may not fit in its memory. In the first replica, the other
        stages yield after the chief has left the context.
        """
        strategy, devices = self._strategy, self._strategy.stage_devices
        with contextlib.nullcontext() if devices is None else devices.values_on_host(part.variables):
            if strategy.local_replicas.start != 0:
                yield part.full_model
                return
            reads = _RemoteReads(strategy, part)
            if strategy.pipeline_rank != 0:
                reads.answer()
                yield part.full_model
                return
            try:
                with keras_internals.replace_reads(reads.missing_variables, reads.read):
                    yield part.full_model
            finally:
                reads.end()

    def regularization(self, part: Any) -> float:
        """See base class. A shared variable is counted once."""
        local_loss = sum(float(tf.reduce_sum(loss)) for stage in part.stages.values() for loss in stage.weight_losses())
        losses = self._strategy.group.gather("stages/regularization", local_loss, LONG_SECONDS)
        return math.fsum(losses[:: self._strategy.grid.replicas])

    def outputs(self, outputs: Any) -> Any:
        """See base class. The last stage sends the outputs to all other stages."""
        local_outputs = tf.nest.map_structure(lambda output: output if self.computes_outputs else output[:0], outputs)
        return gather_structure(local_outputs, self._strategy.pipeline_collectives)
