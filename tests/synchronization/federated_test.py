"""Federated averaging against plain SGD and NumPy in float64; independence of the number of replicas; bad input."""

import keras
import numpy as np
import pytest

import tfdist
from tests.array_batches import ArrayBatches
from tests.selection import quick
from tests.synchronization.linear_regression import RATE, assert_close, momentum_of, trainer_of
from tfdist.config.sync import parse_sync
from tfdist.data.client_examples import Clients
from tfdist.errors import InputError, NotFiniteError
from tfdist.gradients import LossScale

RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(60, 5)), RANDOM.normal(size=(60, 2))
BATCH = 4
UNEQUAL = "fedavg(clients=7, fraction=0.5, local_epochs=2, client_sizes=power_law{})"
MOMENTUM = momentum_of(0.9)


@pytest.fixture(params=[1, 2, 3])
def replicas(request, float64):
    return tfdist.load_strategy("mirrored", devices=request.param)


def trained(strategy, sync, steps=4, x=X, y=Y, optimizer=None, layers=(), options=None, **arguments):
    trainer = trainer_of(strategy, sync, optimizer, layers, **(options or {}))
    log = tfdist.Schedule(log_every=1)
    history = trainer.fit(x, y, batch_size=BATCH, steps=steps, verbose=0, schedule=log, **arguments)
    return trainer, history


def weights(trainer):
    return [np.asarray(w) for w in trainer.model.get_weights()]


def in_numpy(start, sync, rounds, proximal=0.0, momentum=0.0, outer=(1.0, 0.0)):
    """Returns the global weights after these rounds, and the mean loss of each."""
    clients = Clients(parse_sync(sync), len(X), seed=0)
    whole, velocity, losses = np.vstack(start), 0.0, []
    for number in range(rounds):
        change, examples, loss, rows = 0.0, 0, 0.0, 0
        for client in clients.sample_clients(number):
            w, buffer = whole.copy(), 0.0
            for batch in clients.batches(number, client, BATCH):
                x, y = np.hstack([X[batch], np.ones((len(batch), 1))]), Y[batch]
                loss, rows = loss + len(x) * np.mean((x @ w - y) ** 2), rows + len(x)
                gradient = 2 / y.size * x.T @ (x @ w - y) + proximal * (w - whole)
                buffer = momentum * buffer - RATE * gradient
                w = w + buffer
            own = len(clients.examples[client])
            change, examples = change + own * (whole - w), examples + own
        velocity = outer[1] * velocity - outer[0] * change / examples
        whole = whole + velocity
        losses.append(loss / rows)
    return [whole[:-1], whole[-1]], losses


@pytest.mark.parametrize(
    ("parameters", "reference", "optimizer"),
    [
        ("", {}, None),
        (", proximal=0.5", {"proximal": 0.5}, None),
        ("", {"momentum": MOMENTUM}, lambda: keras.optimizers.SGD(RATE, momentum=0.9)),
        (", outer='sgd(momentum=0.9, learning_rate=0.5)'", {"outer": (0.5, MOMENTUM)}, None),
    ],
)
def test_unequal_clients_equal_numpy_on_any_number_of_replicas(parameters, reference, optimizer, replicas):
    sync = UNEQUAL.format(parameters)
    trainer = trainer_of(replicas, sync)
    trainer.build((X, Y))
    start = weights(trainer)
    wanted, losses = in_numpy(start, sync, 4, **reference)
    trainer, history = trained(replicas, sync, optimizer=optimizer)
    assert_close(weights(trainer), wanted)
    assert [record["loss"] for record in history.records] == pytest.approx(losses, rel=1e-9)


@pytest.mark.parametrize("compression", quick(["int8", "topk(ratio=0.2)"], "topk(ratio=0.2)"))
def test_changes_are_compressed(compression, mirrored3):
    exact, _ = trained(mirrored3, UNEQUAL.format(""), steps=12)
    lossy, history = trained(
        mirrored3, UNEQUAL.format(""), steps=12, options={"compression": compression, "compression_min_bytes": 0}
    )
    [first, _], [other, _] = weights(lossy), weights(exact)
    assert 0 < np.linalg.norm(first - other) < 0.5 * np.linalg.norm(other)
    assert history.records[-1]["payload_bytes"] > 0
    kernel, _ = lossy.model.trainable_variables
    first, *others = [np.asarray(value) for value in mirrored3.local(kernel.value)]
    assert all((first == copy).all() for copy in others)
    assert [name for name in lossy.state if name.endswith("/error")] or compression == "int8"


def test_replicas_without_clients_may_have_maximum_pooling():
    """In float32, in which TensorFlow's gradient of a maximum pooling without rows ends the process."""
    layers = keras.layers
    pooling = (lambda: layers.Reshape((5, 1)), lambda: layers.Conv1D(3, 2), layers.MaxPooling1D, layers.Flatten)
    strategies = [tfdist.load_strategy("mirrored", devices=devices) for devices in (3, 1)]
    several, one = (trained(strategy, "fedavg(clients=4, fraction=0.25)", layers=pooling)[0] for strategy in strategies)
    assert_close(weights(several), weights(one), 1e-5)


class Annealed(keras.layers.Layer):
    """Counts the batches and rows of its training, and scales its outputs by the number of batches."""

    def build(self, shape):
        self.batches, self.rows = (self.add_weight(dtype="int64", trainable=False, initializer="zeros") for _ in "br")
        self.has_begun = self.add_weight(dtype="bool", trainable=False, initializer="zeros")

    def call(self, x, training=False):
        scale = 1 / (1 + keras.ops.cast(self.batches, x.dtype) / 10)
        if training:
            self.batches.assign_add(1)
            self.rows.assign_add(keras.ops.cast(keras.ops.shape(x)[0], "int64"))
            self.has_begun.assign(True)
        return x * scale


def test_clients_count_from_the_global_counters_whose_mean_is_taken(float64):
    """Otherwise a client continues the counters of the one before it on its replica."""
    sync, found = UNEQUAL.format(""), []
    for devices in (1, 2, 3):
        trainer, _ = trained(tfdist.load_strategy("mirrored", devices=devices), sync, layers=[Annealed])
        found.append(weights(trainer))
        for variable in trainer.model.non_trainable_variables:
            copies = getattr(variable.value, "values", [variable.value])
            assert len({int(copy.numpy()) for copy in copies}) == 1
    for other in found[1:]:
        assert_close([x.astype(float) for x in other], [x.astype(float) for x in found[0]])
    clients, batches, rows = Clients(parse_sync(sync), len(X), seed=0), 0, 0
    for number in range(4):
        drawn = clients.sample_clients(number)
        sizes = [len(clients.examples[client]) for client in drawn]
        steps = [len(list(clients.batches(number, client, BATCH))) for client in drawn]
        batches += round(np.average(steps, weights=sizes))
        rows += round(np.average([2 * size for size in sizes], weights=sizes))
    counters = [x for x in found[0] if not np.issubdtype(x.dtype, np.floating)]
    assert [int(x) for x in counters] == [batches, rows, 1]


def test_a_loss_that_is_not_finite_ends_the_run_at_its_round(mirrored3):
    sync = "fedavg(clients=6, fraction=0.5)"
    clients = Clients(parse_sync(sync), len(X), seed=0)
    bad = clients.sample_clients(2)[0]
    number = next(n for n in range(9) if bad in clients.sample_clients(n))
    x = X.copy()
    x[clients.examples[bad][-1]] = np.nan
    trainer = trainer_of(mirrored3, sync)
    with pytest.raises(NotFiniteError, match=f"at step {number}"):
        trainer.fit(x, Y, batch_size=BATCH, steps=9, verbose=0)
    assert trainer.step == number
    if number:
        whole, _ = trained(mirrored3, sync, steps=number, x=x)
        assert_close(weights(trainer), weights(whole))


def test_weights_changed_by_the_program_are_taken_over(mirrored3):
    zeros = [np.zeros((5, 2)), np.zeros(2)]
    trainer, _ = trained(mirrored3, "fedavg(clients=5, fraction=1.0)", steps=2)
    trainer.model.set_weights(zeros)
    trainer.fit(X, Y, batch_size=len(X), steps=1, verbose=0)
    # One batch for each client, so that a round is a step of gradient descent on all examples.
    assert_close(weights(trainer), [RATE * 2 / Y.size * X.T @ Y, RATE * 2 / Y.size * Y.sum(axis=0)])


def test_evaluations_and_checkpoints_change_nothing_and_replicas_may_change(mirrored3, tmp_path):
    sync = UNEQUAL.format(", outer='adam(learning_rate=0.1)'")
    plain, _ = trained(mirrored3, sync, steps=6)
    trainer = trainer_of(mirrored3, sync)
    checkpoints = tfdist.Checkpoints(directory=str(tmp_path), every=2)
    schedule = tfdist.Schedule(eval_every=1)
    arguments = {"batch_size": BATCH, "verbose": 0, "validation_data": (X, Y), "schedule": schedule}
    trainer.fit(X, Y, steps=4, checkpoints=checkpoints, **arguments)
    other = trainer_of(tfdist.load_strategy("mirrored", devices=2), sync)
    other.build((X, Y))
    assert other.resume(tmp_path) == 4
    other.fit(X, Y, steps=6, **arguments)
    assert other.step == 6
    assert_close(weights(other), weights(plain))


class Ledger(tfdist.reporting.ledger_file.NullLedger):
    """Keeps what is written."""

    def __init__(self):
        self.written = []

    def write(self, first_step, steps, numbers):
        """Keeps an entry."""
        self.written.append((first_step, steps, sorted(numbers)))


def test_the_ledger_has_the_examples_of_each_round(mirrored3):
    ledger = Ledger()
    trained(mirrored3, UNEQUAL.format(""), steps=3, reporting=tfdist.Reporting(ledger=ledger))
    clients = Clients(parse_sync(UNEQUAL.format("")), len(X), seed=0)
    wanted = [
        (number, 1, sorted(i for client in clients.sample_clients(number) for i in [*clients.examples[client]] * 2))
        for number in range(3)
    ]
    assert ledger.written == wanted


@pytest.mark.parametrize(
    ("sync", "data", "arguments", "message"),
    [
        ("fedavg(clients=61)", (X, Y), {}, "Every client needs an example. "),
        (
            "fedavg(clients=31, shards_per_client=2)",
            (X, Y),
            {},
            "Every client needs an example in each of its 2 shards",
        ),
        ("fedavg(clients=5, shards_per_client=2)", (X, Y.reshape(60, 2, 1)), {}, "each example needs a class label"),
        ("fedavg(clients=5)", (X, Y), {"steps_per_epoch": 30}, "steps_per_epoch"),
        ("fedavg(clients=5)", (X, Y), {"schedule": tfdist.Schedule(elastic_batch="replica")}, "elastic_batch"),
        ("fedavg(clients=60, fraction=0.01)", (X, Y), {}, "at least the number of replicas"),
        ("fedavg(clients=5)", (ArrayBatches((X, Y), 10), None), {}, "random access"),
        ("fedavg(clients=5)", (X, Y), {"balance": "measured"}, "balance=measured"),
        ("fedavg", (X, Y), {"accumulate_steps": 2}, "accumulate_steps"),
        ("fedavg", (X, Y), {"ema": 0.9}, "ema"),
        ("fedavg", (X, Y), {"loss_scale": LossScale()}, "a loss scale"),
    ],
)
def test_data_and_options_that_clients_cannot_have(sync, data, arguments, message, mirrored3):
    with pytest.raises(InputError, match=message) as error:
        of_fit = {key: value for key, value in arguments.items() if key in ("steps_per_epoch", "schedule")}
        trainer = trainer_of(mirrored3, sync, **{key: arguments[key] for key in arguments.keys() - of_fit.keys()})
        trainer.fit(*data, batch_size=BATCH, steps=2, verbose=0, **of_fit)
    assert "\n" not in str(error.value)
