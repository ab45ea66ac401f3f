"""A mesh of devices with named axes, over which the dims of a model's tensors are laid out: DTensor.

Shazeer et al., Mesh-TensorFlow: Deep Learning for Supercomputers, 2018 (arXiv:1811.02084).
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfdist import keras_internals
from tfdist.cluster import Cluster
from tfdist.collectives import OneReplica
from tfdist.devices import share_cores
from tfdist.dims import dims_of
from tfdist.dtensor import Batches, Devices, engine_mesh, like, over_rows, refuse_crashes
from tfdist.group import Group
from tfdist.layout import Layout, laid_out, parse_layout
from tfdist.mesh import mesh_of
from tfdist.strategy import HasCollectives, State


class MeshOfDevices(HasCollectives):
    """One replica whose tensors are spread over a mesh: the engine splits its computation, and adds what has to be sent."""

    name = "mesh"
    replicas = 1
    local_replicas = range(1)
    compiles_replicas = True
    global_view = True

    def __init__(
        self,
        *,
        cluster: Cluster,
        join: Callable[[Cluster], Group],
        devices: int = 0,
        mesh_shape: str = "",
        layout: str = "",
        intra_op_threads: int = 0,
        start_timeout_seconds: float = 120.0,
    ):
        """Starts the engine.

        Args:
          cluster: this process among the job's, which have equal parts of the mesh.
          join: joins the job's group.
          devices: how many this process has; 0 for as many as the mesh needs.
          mesh_shape: as the flag; see `tfdist.mesh`.
          layout: as the flag; see `tfdist.layout`.
          intra_op_threads: of one operation; 0 for a share of the cores, and to keep to it.
          start_timeout_seconds: how long to wait for the other processes' servers, once all processes have come.
        """
        self.cluster = cluster
        mesh = mesh_of(mesh_shape, devices, cluster.size)
        self.rules = parse_layout(layout, mesh)
        share_cores(cluster, intra_op_threads)
        self.group = join(cluster)
        self.devices = Devices(mesh, engine_mesh(mesh, cluster, self.group, start_timeout_seconds))
        self.collectives = OneReplica()
        self._unborn: list[keras_internals.Newborn] = []

    @property
    def batch_parts(self) -> int:
        """See base class."""
        return self.devices.mesh.axes[self.rules["batch"]]

    @contextlib.contextmanager
    def _placement(self) -> Iterator[None]:
        """See base class: variables with initializers are laid out at the end, when the names of their dims are known."""
        self._bear_all()
        with keras_internals.births_deferred(self._unborn, self._bear), tf.variable_creator_scope(self._whole_variable):
            yield
        self._bear_all()

    def _bear_all(self) -> None:
        while self._unborn:
            self._bear(self._unborn.pop(0))

    def _bear(self, newborn: keras_internals.Newborn) -> None:
        variable = newborn.variable
        layout = keras_internals.layout_of(variable)
        if layout is None:
            dims = dims_of(variable, newborn.owners)
            layout = laid_out(variable.path, dims, variable.shape, self.rules, self.devices.mesh)
            keras_internals.set_layout(variable, layout)
        with tf.init_scope():
            value = keras_internals.initial_value(variable)
            born = self.devices.variable(value, layout, variable.path.replace("/", "_"), variable.trainable)
        keras_internals.give_value(variable, born)

    def _whole_variable(self, next_creator: Callable[..., tf.Variable], **given: Any) -> tf.Variable:
        """A variable that has a value from the start, such as a learning rate: whole on every device."""
        with tf.init_scope():
            value = given["initial_value"]
            value = tf.convert_to_tensor(value() if callable(value) else value, given.get("dtype"))
            layout = Layout((None,) * value.shape.rank)
            return self.devices.variable(value, layout, given.get("name") or "variable", given.get("trainable", True))

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """See base class."""
        return self.in_replica(function)(*args)

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """See base class; checks first for what crashes the engine."""
        compiled = tf.function(function, autograph=False)

        def checked(*args: Any) -> Any:
            refuse_crashes(compiled.get_concrete_function(*args).graph)
            return compiled(*args)

        return checked

    def local(self, value: Any) -> list[Any]:
        """See base class; outside of a compiled function the value is a whole, ordinary tensor."""
        return [value if tf.inside_function() else self.devices.whole(value)]

    def distribute(self, make_dataset: Callable[[Sequence[int], int], tf.data.Dataset]) -> Iterator[Any]:
        """See base class."""
        return Batches(make_dataset(self.local_replicas, self.replicas), self.devices, self.rules["batch"])

    def outputs(self, outputs: Any) -> Any:
        """See base class: split over rows alone.

        Losses over split classes either do not compile or are silently wrong in float64 (tests/traps/dtensor_test.py).
        """

        def place(tensor: tf.Tensor) -> tf.Tensor:
            return over_rows(tensor, self.devices, self.rules["batch"])

        return keras.tree.map_structure(lambda x: keras_internals.with_mask_of(place(x), x, place), outputs)

    def apply(
        self, optimizer: keras.Optimizer, gradients: Sequence[tf.Tensor], variables: Sequence[keras.Variable]
    ) -> None:
        """See base class. The update is computed as a whole before anything is assigned.

        An optimizer assigns to a slot and then reads it. DTensor may compile that to a read before the assignment, without
        a word, where the layouts of slot and gradient differ (tests/traps/dtensor_test.py).
        """
        changed = [*variables, *optimizer.variables]
        stored = [keras_internals.value_of(variable) for variable in changed]
        before = [(variable, tf.convert_to_tensor(value)) for variable, value in zip(changed, stored, strict=True)]
        gradients = [like(g, keras_internals.value_of(v)) for g, v in zip(gradients, variables, strict=True)]
        with keras_internals.updates_without_effects(), keras.StatelessScope(state_mapping=before) as scope:
            optimizer.apply(gradients, list(variables))
        for variable, value in zip(changed, stored, strict=True):
            value.assign(like(tf.cast(scope.get_current_value(variable), value.dtype), value))

    def allocate(self, states: Sequence[State]) -> list[tf.Variable]:
        """See base class: whole on every device."""
        found = []
        for state in states:
            initial = tf.broadcast_to(tf.cast(state.initial, state.dtype), state.shape)
            found.append(
                self.devices.variable(initial, Layout((None,) * len(state.shape)), state.name, trainable=False)
            )
        return found

    def owns(self, variable: keras.Variable) -> bool:
        """See base class."""
        value = keras_internals.value_of(variable)
        return value is None or isinstance(value, dtensor.DVariable)

    @contextlib.contextmanager
    def whole(self, variables: Sequence[keras.Variable]) -> Iterator[None]:
        """See base class."""
        spread = [keras_internals.value_of(variable) for variable in variables]
        for variable, value in zip(variables, spread, strict=True):
            keras_internals.give_value(variable, tf.Variable(self.devices.whole(value)))
        try:
            yield
        finally:
            for variable, value in zip(variables, spread, strict=True):
                keras_internals.give_value(variable, value)


STRATEGY = MeshOfDevices
