"""Usage of `fit` on two replicas, compared with plain Keras: callbacks, kinds of data, options, repeated fits."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.array_batches import ArrayBatches
from tests.keras_fit.comparing import Compare, both, differences
from tests.selection import quick
from tfdist import keras_fit
from tfdist.errors import NotFiniteError

X = np.random.default_rng(0).normal(size=(24, 5))
Y = np.random.default_rng(1).integers(0, 3, 24)
SPARSE = keras.losses.SparseCategoricalCrossentropy


def network(optimizer: Any = "adamw", **options: Any) -> keras.Model:
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(6, "tanh"), keras.layers.Dense(3)])
    model.compile(optimizer, SPARSE(from_logits=True), **({"metrics": ["accuracy"]} | options))
    return model


def by_generator(model: keras.Model) -> Any:
    def batches() -> Iterator[Any]:
        while True:
            for start in (0, 6, 12, 18):
                yield X[start : start + 6], Y[start : start + 6], None

    return model.fit(batches(), epochs=2, steps_per_epoch=4, verbose=0).history


def by_tf_data(model: keras.Model) -> Any:
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(24).batch(7).prefetch(1).map(lambda x, y: (x, y, None))
    return model.fit(data, epochs=2, verbose=0, validation_data=data).history


def by_an_endless_dataset(model: keras.Model) -> Any:
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(24).repeat().batch(5)
    held_out = tf.data.Dataset.from_tensor_slices((X, Y)).repeat().batch(7)
    return model.fit(data, epochs=3, steps_per_epoch=3, verbose=0, validation_data=held_out, validation_steps=2).history


def by_a_py_dataset(model: keras.Model) -> Any:
    return model.fit(ArrayBatches((X, Y), 6), epochs=2, verbose=0, shuffle=False).history


def in_two_fits(model: keras.Model) -> Any:
    first = model.fit(X, Y, batch_size=6, epochs=1, verbose=0).history
    second = model.fit(X, Y, batch_size=6, epochs=3, initial_epoch=1, verbose=0).history
    ours = keras_fit.distribution_of(model)
    with ours.strategy.scope() if ours else contextlib.nullcontext():
        model.compile("sgd", SPARSE(from_logits=True), metrics=["accuracy"])
    return first, second, model.fit(X, Y, batch_size=8, verbose=0).history


def with_validation_in_between(model: keras.Model) -> Any:
    split = {"validation_split": 0.25, "validation_freq": 2, "validation_batch_size": 4}
    return model.fit(X, Y, batch_size=6, epochs=4, verbose=0, **split).history


def with_callbacks(model: keras.Model) -> Any:
    seen: list[Any] = []
    batch = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append((batch, dict(logs))),
        on_epoch_end=lambda epoch, logs: seen.append((epoch, dict(logs))),
    )
    rate = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
    plateau = keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=10.0)
    early = keras.callbacks.EarlyStopping("val_loss", patience=1, min_delta=10.0, restore_best_weights=True)
    callbacks = [batch, rate, plateau, early]
    history = model.fit(
        X, Y, batch_size=6, epochs=9, verbose=0, callbacks=callbacks, validation_data=(X, Y), shuffle=False
    )
    return [list(one) for one in seen], history.history, history.epoch


class Freezing(keras.callbacks.Callback):
    """Freezes the first layer in the middle of the second epoch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._seen = getattr(self, "_seen", 0) + 1
        if self._seen == 6:
            self.model.layers[0].trainable = False
            self.model.make_train_function(force=True)


def freezing_a_layer(model: keras.Model) -> Any:
    first = model.fit(X, Y, batch_size=6, epochs=3, verbose=0, callbacks=[Freezing()]).history
    model.layers[0].trainable = True
    model.train_function = None
    return first, model.fit(X, Y, batch_size=6, verbose=0).history


USES = (
    by_generator,
    by_tf_data,
    by_an_endless_dataset,
    by_a_py_dataset,
    in_two_fits,
    with_validation_in_between,
    with_callbacks,
    freezing_a_layer,
)


@pytest.mark.parametrize(
    "use",
    quick(USES, by_an_endless_dataset, by_a_py_dataset, in_two_fits, with_validation_in_between, freezing_a_layer),
)
@pytest.mark.filterwarnings("ignore:.*ran out of data:UserWarning", "ignore:.*shuffle=True:UserWarning")
def test_a_use_of_fit(use: Callable[[keras.Model], Any], as_one_device: Compare) -> None:
    as_one_device(network, use)


def fitted(model: keras.Model) -> Any:
    return model.fit(X, Y, batch_size=6, epochs=2, verbose=0).history


OPTIONS: tuple[dict[str, Any], ...] = (
    {"accumulate_steps": 2},
    {"accumulate_steps": 5},
    {"bucket_mb": 0.001},
    {"steps_per_call": 1},
    {"recompute": "full"},
)


@pytest.mark.parametrize("options", quick(OPTIONS, {"accumulate_steps": 5}, {"steps_per_call": 1}), ids=str)
def test_an_option_changes_no_number(options: dict[str, Any], as_one_device: Compare) -> None:
    as_one_device(network, fitted, **options)


def test_compression_is_used_and_learns(mirrored2: tfdist.Strategy) -> None:
    ours, plain = both(mirrored2, network, fitted, compression="fp16", compression_min_bytes=0)
    assert differences(ours, plain)
    assert abs(ours[0]["loss"][-1] - plain[0]["loss"][-1]) < 1e-2


def test_a_loss_that_is_not_finite_ends_fit_or_is_left_to_the_callback(mirrored2: tfdist.Strategy) -> None:
    with mirrored2.scope():
        model = tfdist.distribute(network(), mirrored2)
    bad = X.copy()
    bad[8] = np.nan
    with pytest.raises(NotFiniteError, match="The loss is nan at step 1"):
        model.fit(bad, Y, batch_size=6, shuffle=False, verbose=0)
    history = model.fit(
        bad, Y, batch_size=6, epochs=3, shuffle=False, verbose=0, callbacks=[keras.callbacks.TerminateOnNaN()]
    )
    assert np.isnan(history.history["loss"]).all() and len(history.epoch) == 1
    assert all(np.isfinite(weight).all() for weight in model.get_weights())


def test_models_that_are_not_distributed_are_keras_s_own(mirrored2: tfdist.Strategy) -> None:
    """Patched methods do not change other models."""
    with mirrored2.scope():
        tfdist.distribute(network(), mirrored2)
    keras.utils.set_random_seed(1)
    plain = network()
    plain.fit(X, Y, batch_size=6, verbose=0)
    assert type(plain.train_function).__name__ == "function" and not hasattr(plain, "_tfdist_distributed")


def test_predicting_in_between_keeps_what_was_compiled(mirrored2: tfdist.Strategy) -> None:
    """The state of compression and loss scaling is not lost, and nothing is traced again."""
    with mirrored2.scope():
        model = tfdist.distribute(network(), mirrored2)
    functions = []
    for _ in range(2):
        model.fit(X, Y, batch_size=6, verbose=0)
        model.evaluate(X, Y, verbose=0)
        model.predict(X, verbose=0)
        functions.append(keras_fit.distribution_of(model)._functions)
    assert functions[0] is functions[1]
