"""One rank of the tests of the distributed optimizer: runs all experiments and prints the results as one line of JSON.

python tests/horovod/optimizer_worker.py FOLDER
"""

import copy
import functools
import json
import pathlib
import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist.horovod as hvd
from tfdist.errors import InputError

keras.config.set_floatx("float64")
keras.config.set_dtype_policy("float64")
found: dict[str, Any] = {}
ROWS = 24
RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(ROWS, 6)), RANDOM.normal(size=(ROWS, 2))
IDS = RANDOM.integers(0, 50, (ROWS, 3))


def model_of(seed: int = 1, hidden: int = 8, name: str = "model") -> keras.Model:
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(hidden, activation="tanh", name="hidden"), keras.layers.Dense(2, name="last")]
    return keras.Sequential([keras.Input((6,)), *layers], name=name)


def embedding_model() -> keras.Model:
    keras.utils.set_random_seed(2)
    layers = [
        keras.layers.Embedding(5000, 16, name="table"),
        keras.layers.Flatten(),
        keras.layers.Dense(2, name="last"),
    ]
    return keras.Sequential([keras.Input((3,), dtype="int32"), *layers])


def normal_model() -> keras.Model:
    keras.utils.set_random_seed(4)
    layers = [
        keras.layers.Dense(5, name="hidden"),
        hvd.SyncBatchNormalization(name="norm"),
        keras.layers.Dense(2, name="last"),
    ]
    return keras.Sequential([keras.Input((6,)), *layers])


def mine(rows: int = ROWS) -> slice:
    return slice(hvd.rank(), rows, hvd.size())


def trained(
    model: keras.Model, optimizer: keras.Optimizer, x: np.ndarray = X, steps: int = 4, passes: int = 1
) -> list[float]:
    """Returns the weights after `steps` steps with the global batch; a rank's rows are divided among passes."""
    model.compile(optimizer, "mse")
    own_x, own_y = x[mine()], Y[mine()]
    size = len(own_x) // passes
    model.fit(own_x, own_y, batch_size=size, epochs=steps, shuffle=False, verbose=0)
    return weights(model)


def weights(model: keras.Model) -> list[float]:
    return np.concatenate([np.ravel(weight) for weight in model.get_weights()]).tolist()


def refused(function: Any) -> str:
    try:
        function()
    except InputError as error:
        return str(error)
    return ""


def accumulation() -> None:
    for name, make in (("SGD", lambda: keras.optimizers.SGD(0.1)), ("Adam", lambda: keras.optimizers.Adam(0.01))):
        optimizer = hvd.DistributedOptimizer(make(), backward_passes_per_step=2, average_aggregated_gradients=True)
        found[f"2 passes of {name}"] = trained(model_of(), optimizer, passes=2)
        found[f"2 passes of {name}, updates"] = int(optimizer.iterations)
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1), backward_passes_per_step=2, average_aggregated_gradients=True
    )
    found["2 sparse passes"] = trained(embedding_model(), optimizer, IDS, passes=2)
    for where in ("eager", "graph"):
        first, second, both = keras.Variable([0.0]), keras.Variable([0.0]), keras.Variable([0.0])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
        optimizer.build([first, second, both])
        for variables, gradients in [([first, second, both], [1.0, None, 4.0]), ([both, second], [8.0, 2.0])] * 2:
            given = [None if x is None else tf.constant([x * (1 + hvd.rank())]) for x in gradients]
            apply = functools.partial(optimizer.apply, given, variables)
            (apply if where == "eager" else tf.function(apply))()
        found[f"passes without some gradients, {where}"] = [float(v[0]) for v in (first, second, both)]
    known = tf.function(lambda: optimizer.apply([tf.ones([1]), None], [both, unseen]))
    unseen = keras.Variable([0.0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    optimizer.build([both, unseen])
    known()
    known()
    optimizer.apply([tf.ones([1])], [unseen])
    try:
        known()
    except tf.errors.InvalidArgumentError as error:
        found["a gradient after tracing"] = str(error)
    # A NaN in the first of two passes of a step must not affect the next step.
    variable = keras.Variable([1.0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    values = []
    for gradient in (float("nan"), 1.0, 1.0, 2.0):
        optimizer.apply([tf.constant([gradient if hvd.rank() == 0 else 1.0], tf.float64)], [variable])
        values.append(float(variable.numpy()[0]))
        if np.isnan(values[-1]):
            variable.assign([1.0])
    found["after a NaN"] = values


def compression() -> None:
    methods = {
        "fp16": hvd.Compression.fp16,
        "powersgd": hvd.Compression.powersgd(rank=1),
        "topk": hvd.Compression.topk(ratio=0.5),
        "text": "bf16",
    }
    for name, method in methods.items():
        keras.utils.set_random_seed(5)
        layers = [keras.layers.Dense(3000), keras.layers.Dense(2)]
        wide = keras.Sequential([keras.Input((6,)), *layers], name=f"of_rank_{hvd.rank()}")  # as if one had loaded it
        before = np.concatenate([np.ravel(w) for w in wide.get_weights()])
        after = np.array(trained(wide, hvd.DistributedOptimizer(keras.optimizers.SGD(0.001), compression=method)))
        found[f"compression {name}"] = (after - before).tolist()
    # The state of a lossy method must not contain values of a step that was not finite.
    variable = keras.Variable(np.zeros((200, 100)))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression="topk(ratio=0.1)")
    seen = []
    for bad in (False, True, False):
        gradient = np.ones((200, 100)) * (float("inf") if bad and hvd.rank() == 0 else 1.0)
        optimizer.apply([tf.constant(gradient)], [variable])
        seen.append(bool(np.isfinite(variable.numpy()).all()))
        variable.assign(np.zeros((200, 100)))
    found["finite after topk"] = seen


def loss_scale() -> None:
    """An overflow on rank 0 alone: every rank skips the step, whichever way the two are wrapped; then rank 1 joins."""
    going_on: list[tuple[Any, ...]] = []
    for name, wrap in {
        "outside": lambda: hvd.DistributedOptimizer(
            keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), 4.0)
        ),
        "inside": lambda: keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)), 4.0),
    }.items():
        variable, optimizer = keras.Variable([0.0]), wrap()
        optimizer.build([variable])
        step, seen = compiled(optimizer, variable), []
        for bad in (False, True, False):
            gradient = float("inf") if bad and hvd.rank() == 0 else 4.0 * (1 + hvd.rank())
            step(tf.constant([gradient], tf.float64))
            seen.append([float(variable.numpy()[0]), float(optimizer.dynamic_scale.numpy())])
        found[f"loss scale {name}"] = seen
        variable.assign([0.0])
        going_on.append((name, step, variable, optimizer))
    if hvd.rank() == 0:
        for _, step, *_ in going_on:
            step(tf.constant([2.0], tf.float64))
        alone = keras.Variable([0.0])
        hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)).apply([tf.constant([2.0], tf.float64)], [alone])
        found["first step after another rank has joined"] = float(alone.numpy()[0])
    hvd.join()
    for name, _, variable, optimizer in going_on:
        found[f"loss scale {name}, joined"] = [float(variable.numpy()[0]), float(optimizer.dynamic_scale.numpy())]
    alone = hvd.add_process_set([0])
    if alone.included():  # the other rank does not call
        inner = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=alone)
        variable, optimizer = keras.Variable([0.0]), keras.optimizers.LossScaleOptimizer(inner, 4.0)
        optimizer.apply([tf.constant([4.0], tf.float64)], [variable])
        found["loss scale of a set"] = float(variable.numpy()[0])
    hvd.barrier()
    keras.config.set_dtype_policy("mixed_float16")  # in which Keras wraps the optimizer in a loss scale
    model = model_of()
    trained(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)))
    found["mixed precision"] = [type(model.optimizer).__name__, weights(model)]
    keras.config.set_dtype_policy("float64")


def compiled(optimizer: keras.Optimizer, variable: keras.Variable) -> Any:
    return tf.function(lambda gradient: optimizer.apply([gradient], [variable]))


def saving(folder: pathlib.Path) -> None:
    model = model_of()
    trained(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9)), steps=2)
    path = folder / f"model-{hvd.rank()}.keras"
    model.save(path)
    plain = keras.models.load_model(path)
    found["plain"] = [type(plain.optimizer) is keras.optimizers.SGD, weights(plain) == weights(model)]
    again = hvd.load_model(path)
    again.fit(X[mine()], Y[mine()], batch_size=ROWS, epochs=2, shuffle=False, verbose=0)
    found["saved and loaded"] = weights(again)
    found["an instance of"] = isinstance(again.optimizer, keras.optimizers.SGD)


def tapes() -> None:
    model = model_of()
    optimizer = keras.optimizers.SGD(0.1)
    for _ in range(4):  # eagerly
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(X[mine()]) - Y[mine()]))
        tape = hvd.PartialDistributedGradientTape(tape, local_layers=model.get_layer("hidden"))
        local, reduced = tape.get_local_and_global_gradients(loss, model.trainable_variables)
        found["local gradients"] = [[v.path for v, _ in local], [v.path for v, _ in reduced]]
        found["hidden gradient"] = float(tf.reduce_sum(local[0][1]))
        break
    with hvd.DistributedGradientTape(tf.GradientTape(persistent=True), op=hvd.Sum) as tape:
        loss = tf.reduce_sum(model(X[mine()]))
    gradients = tape.gradient(loss, {"all": model.trainable_variables})
    optimizer.apply(gradients["all"], model.trainable_variables)
    found["tape"] = weights(model)
    model = model_of()
    partial = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=[model.get_layer("hidden")])
    trained(model, partial, steps=1)
    found["partial"] = [model.get_layer(name).get_weights()[0].tolist() for name in ("hidden", "last")]
    model = model_of()
    found["tape of the rest"] = trained(
        model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), gradient_predivide_factor=2.0, groups=1)
    )


def tapes_of_odd_things() -> None:
    """Tapes with other operations, with compression, with sources of unknown rows, and with Adasum."""
    rank = hvd.rank()

    def gradient_of(x: Any, factor: Any, **options: Any) -> tf.Tensor:
        with hvd.DistributedGradientTape(tf.GradientTape(), **options) as tape:
            tape.watch(x)
            loss = tf.reduce_sum(tf.square(x) * factor)
        return tape.gradient(loss, [x])[0]

    one = tf.constant([0.5])
    fine = 1.0 + 2.0**-12 + rank
    found["maximum"] = gradient_of(one, fine, op=hvd.Max).numpy().tolist()
    found["maximum as fp16"] = gradient_of(one, fine, op=hvd.Max, compression=hvd.Compression.fp16).numpy().tolist()
    found["adasum"] = gradient_of(one * [6.0, 8.0], 1.0 if rank else [0.0, 0.5], op=hvd.Adasum).numpy().tolist()
    for name, options in {"mean": {}, "sum": {"op": hvd.Sum}, "divided": {"gradient_predivide_factor": 2.0}}.items():

        @tf.function(input_signature=[tf.TensorSpec([None, 2])])
        def unknown(x, options=options):
            rows = gradient_of(x, 1.0 + rank, **options)
            with hvd.DistributedGradientTape(tf.GradientTape(), **options) as tape:
                tape.watch(x)
                loss = tf.reduce_sum(tf.gather(x, [0]) * (1.0 + rank))
            return rows, tape.gradient(loss, [x])[0]

        found[f"unknown rows, {name}"] = [g.numpy().tolist() for g in unknown(tf.ones([3, 2]))]


class OwnSteps(keras.Model):
    """A model whose own steps communicate, in training and in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model_of()

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_mean(tf.square(self.inner(x, training=True) - y))
        variables = self.inner.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}

    def test_step(self, data: Any) -> dict[str, Any]:
        return {"sum": hvd.allreduce(tf.reduce_sum(data[1]), op=hvd.Sum)}


def own_steps() -> None:
    """Custom steps with `jit_compile=True`, which is Keras's default on GPUs, and a keyword of scripts for TensorFlow 2."""
    model = OwnSteps()
    model.compile(keras.optimizers.SGD(0.1), jit_compile=True, experimental_run_tf_function=False)
    own_x, own_y = X[mine()], Y[mine()]
    found["sum of targets"] = model.evaluate(own_x, own_y, batch_size=ROWS, verbose=0, return_dict=True)["sum"]
    model.compile(keras.optimizers.SGD(0.1), jit_compile=True)
    model.fit(own_x, own_y, batch_size=ROWS, epochs=4, verbose=0)
    found["own steps"] = weights(model.inner)


def copies() -> None:
    """A deep copy reduces too, whether it was made before or after the first step."""
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, momentum=0.5))
    variable, seen = keras.Variable([0.0]), []
    for one in (copy.deepcopy(optimizer), optimizer):
        one.apply([tf.constant([1.0 + hvd.rank()], tf.float64)], [variable])
        seen.append(float(variable.numpy()[0]))
    copy.deepcopy(optimizer).apply([tf.constant([1.0 + hvd.rank()], tf.float64)], [variable])
    found["copies"] = [*seen, float(variable.numpy()[0])]


def callbacks() -> None:
    """Momentum correction, broadcast from rank 0, averaged logs; random layers keep the seed of their rank."""
    keras.utils.set_random_seed(20 + hvd.rank())
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), "mse")
    logs = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 1.0 if epoch < 1 else 0.5),
    ]
    history = model.fit(X[mine()], Y[mine()], batch_size=ROWS, epochs=3, shuffle=False, verbose=0, callbacks=logs)
    found["schedule"] = [weights(model), history.history["lr"], history.history["loss"]]
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2), keras.layers.Dropout(0.5)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    model.fit(X[mine()], Y[mine()], verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    found["seed"] = [int(v.numpy()[0]) for v in model.non_trainable_variables if "seed" in v.path]


def elastic() -> None:
    model = model_of(seed=hvd.rank())
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    state = hvd.elastic.KerasState(model, batch=hvd.rank(), epoch=hvd.rank())
    attempts = []

    @hvd.elastic.run
    def train(state: Any) -> str:
        attempts.append([state.epoch, weights(model)])
        callbacks = [
            hvd.elastic.CommitStateCallback(state, 1),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.UpdateEpochStateCallback(state),
        ]
        model.fit(X[mine()], Y[mine()], batch_size=4, epochs=1, shuffle=False, verbose=0, callbacks=callbacks)
        if len(attempts) == 1:
            state.commit()
            model.set_weights([weight * 0 for weight in model.get_weights()])
            state.epoch = 99
            raise hvd.elastic.HorovodInternalError("as if a rank were lost")
        return "done"

    found["elastic"] = [train(state), attempts, state.epoch, state.batch, weights(model)]


def elastic_compression() -> None:
    """Rank 1 is new: it has not reduced anything; the state of the compression begins anew on both ranks."""

    def compiled_model() -> keras.Model:
        keras.utils.set_random_seed(30 + hvd.rank())
        layers = [
            keras.layers.Dense(3000, name="hidden"),
            keras.layers.Dropout(0.5, name="drop"),
            keras.layers.Dense(2, name="last"),
        ]
        model = keras.Sequential([keras.Input((6,)), *layers], name="model")
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.001), compression="powersgd(rank=1)", backward_passes_per_step=2
        )
        model.compile(optimizer, "mse")
        return model

    def train(model: keras.Model, steps: int) -> None:
        rows = tf.data.Dataset.from_tensors((X[mine()], Y[mine()])).repeat(steps)
        model.fit(rows, verbose=0)

    model = compiled_model()
    train(model, 5)  # odd, so that one pass is not applied
    if hvd.rank():
        plans = model.optimizer.reduction._plans
        model = compiled_model()
        model.optimizer.reduction._plans |= plans  # elastic jobs have no group for the comparison
    hvd.elastic.KerasState(model).sync()
    sums = model.optimizer.reduction
    # Per-rank state is zero; the new rank has none yet.
    kept = [v for state, v in sums._states.values() if state.per_replica]
    found["kept of its own"] = [len(kept), float(sum(tf.reduce_sum(tf.abs(v)) for v in kept))]
    count = model.optimizer.accumulation._count
    found["passes not applied"] = 0 if count is None else int(count)
    seeds = [int(v.numpy()[0]) for v in model.non_trainable_variables if "seed" in v.path]
    train(model, 2)
    found["elastic weights"] = weights(model)
    shared = {str(key): v for key, (state, v) in sums._states.items() if not state.per_replica}
    found["elastic shared"] = [np.ravel(shared[key].numpy()).tolist() for key in sorted(shared)]
    found["elastic seeds"] = seeds


def errors() -> None:
    sgd = keras.optimizers.SGD(0.1)
    once = hvd.DistributedOptimizer(sgd)
    found["errors"] = [
        refused(lambda: hvd.DistributedOptimizer(once)),
        refused(lambda: hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(once))),
        refused(lambda: hvd.DistributedOptimizer("sgd")),
        refused(lambda: hvd.DistributedOptimizer(sgd, op=hvd.Max)),
        refused(lambda: hvd.DistributedOptimizer(sgd, backward_passes_per_step=0)),
        refused(lambda: hvd.DistributedOptimizer(sgd, op=hvd.Sum, gradient_predivide_factor=2.0)),
        refused(lambda: hvd.allreduce(tf.ones([1]), compression=hvd.Compression.powersgd(rank=2))),
        refused(lambda: hvd.broadcast_global_variables(0)),
        refused(lambda: hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Max, compression="powersgd(rank=2)")),
    ]
    pair = [keras.Variable([0.0], name="first"), keras.Variable([0.0], name="second")]
    model = model_of(hidden=8 + (hvd.rank() == hvd.size() - 1))
    found["other order"] = refused(
        lambda: hvd.DistributedOptimizer(sgd).apply([tf.ones([1])] * 2, [*pair[:: 1 - 2 * hvd.rank()]])
    )
    found["different models"] = refused(lambda: trained(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))))


def main() -> None:
    hvd.init(process_sets="dynamic")
    folder = pathlib.Path(sys.argv[1])
    found["sparse"] = trained(embedding_model(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), IDS)
    dense = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), sparse_as_dense=True)
    found["sparse as dense"] = trained(embedding_model(), dense, IDS)
    found["normalised"] = trained(normal_model(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    two_a_call = model_of()
    two_a_call.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", steps_per_execution=2)
    own = tf.data.Dataset.from_tensors((X[mine()], Y[mine()])).repeat(4)
    two_a_call.fit(own, verbose=0)
    found["two steps a call"] = weights(two_a_call)
    tapes_of_odd_things()
    own_steps()
    copies()
    accumulation()
    compression()
    saving(folder)
    tapes()
    callbacks()
    errors()
    loss_scale()
    elastic_compression()
    elastic()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
