"""Errors of programs: every process reports one line with the rule, what was received, and the remedy."""

import pathlib
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests import processes
from tfdist.errors import InputError

pytestmark = pytest.mark.processes

WORKER = str(pathlib.Path(__file__).with_name("wrong_worker.py"))
X, Y = np.zeros((12, 5), "float32"), np.zeros(12, "int64")


def network(**options: Any) -> keras.Model:
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4)])
    model.compile(**({"optimizer": "sgd", "loss": "sparse_categorical_crossentropy"} | options))
    return model


def in_scope(use: Callable[[keras.Model], object]) -> Callable[[tfdist.Strategy], None]:
    def run(strategy: tfdist.Strategy) -> None:
        with strategy.scope():
            use(network())

    return run


def a_wrapped_optimizer(strategy: tfdist.Strategy) -> None:
    from horovod.tensorflow import keras as hvd

    with strategy.scope():
        model = tfdist.distribute(network(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD())))
    model.fit(X, Y, verbose=0)


WRONG: dict[str, tuple[Callable[[tfdist.Strategy], None], tuple[str, ...]]] = {
    "twice": (
        in_scope(lambda model: tfdist.distribute(tfdist.distribute(model))),
        ("A model can be distributed only once", "Remove the second"),
    ),
    "a wrapped optimizer": (
        a_wrapped_optimizer,
        ("Gradients must be summed over replicas only once", "horovod", "Keras's own optimizer"),
    ),
    "an endless pass": (
        in_scope(lambda model: tfdist.distribute(model).fit(tf.data.Dataset.from_tensors((X, Y)).repeat(), verbose=0)),
        ("repeats indefinitely", "steps_per_epoch"),
    ),
    "another precision": (
        in_scope(lambda model: tfdist.distribute(model, precision="mixed_bfloat16")),
        ("precision must be the precision", "mixed_bfloat16", "keras.config.set_dtype_policy"),
    ),
    "labels that do not fit": (
        in_scope(lambda model: tfdist.distribute(model).fit(X, np.zeros((12, 2, 2)), verbose=0)),
        ("Model, loss and metrics must fit the data", "float32[2, 2]"),
    ),
    "measured compression": (
        in_scope(lambda model: tfdist.distribute(model, compression="auto").fit(X, Y, verbose=0)),
        ("compression=auto", "tfdist train"),
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_it_is_one_line(case: str, mirrored2: tfdist.Strategy) -> None:
    keras.utils.clear_session(free_memory=False)
    use, parts = WRONG[case]
    with pytest.raises(InputError) as caught:
        use(mirrored2)
    assert "\n" not in str(caught.value)
    assert not [part for part in parts if part.lower() not in str(caught.value).lower()], str(caught.value)


def test_keras_s_own_errors_stay(mirrored2: tfdist.Strategy) -> None:
    with pytest.raises(ValueError, match="Make sure all arrays contain the same number of samples"):
        in_scope(lambda model: tfdist.distribute(model).fit(X, Y[:5], verbose=0))(mirrored2)


def test_compiled_replicas_are_for_the_trainer(mirrored2: tfdist.Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a TPU, where every replica needs the same number of rows."""
    monkeypatch.setattr(type(mirrored2), "compiles_replicas", True)
    with mirrored2.scope(), pytest.raises(InputError, match="Received: mirrored. Use tfdist.Trainer instead."):
        tfdist.distribute(network())


ON_PROCESSES = {
    "horovod": {
        "other models": ("InputError: variable ", "differs: rank 0 has", "rank 1 has"),
        "own share": ("InputError: Every process must read the same batches", "remove sharding by rank"),
        "late order": (
            "InputError: Every process must read the same batches",
            " in batches 6 to 11 of fit",
            "random_seed",
        ),
        "late order and a stop": (" in batches 8 to 10 of fit",),
        "other sizes": ("InputError: data: batches differs: rank 0 has 3, rank 1 has 4",),
        "other epochs": ('InputError: epochs differs: rank 0 has "2", rank 1 has "3".',),
        "a trainer's epochs": ('InputError: epochs differs: rank 0 has "2", rank 1 has "3".',),
        "another batch": ("InputError: train_on_batch: the bytes of the batch differs",),
    },
    "multiworker": {
        "other order": ("InputError: Every process must read the same batches", "set_random_seed"),
        "late order of an unknown number": (" in batches 8 to 11 of evaluate",),
        "other options": ("InputError: clip_norm differs: rank 0 has 1.0, rank 1 has 2.0",),
        "another call": ("InputError: Every process must make the same calls", "rank 0 evaluate, rank 1 predict"),
        "a stop on one": ("epochs 1",),
        "a skipped call": (),  # reported by the process that made it
    },
}


@pytest.mark.parametrize("strategy", ON_PROCESSES)
def test_every_process_says_it(strategy: str) -> None:
    """A process that is the only one in a call reports it at the deadline, here after 5 seconds."""
    ways = ON_PROCESSES[strategy]
    command = [sys.executable, WORKER, strategy, ",".join(ways)]
    with processes.job(command, 2, {"TF_CPP_MIN_LOG_LEVEL": "2"}) as job:
        if "a skipped call" in ways:
            alone = "a skipped call: PeerLostError: Every process must call evaluate, but not all did"
            job.wait_for(0, alone, 90)
        for end in job.wait(300):
            lines = {way: [line for line in end.output.splitlines() if line.startswith(f"{way}: ")] for way in ways}
            for way, parts in ways.items():
                assert all(part in "".join(lines[way]) for part in parts), (way, end.output)
