"""Diverged replicas are detected, and the variable and the replica are named."""

from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.experimental import dtensor

from tests.coordination.members import members
from tests.end_to_end.resume.exact_test import IMAGES, LABELS, make_trainer
from tfdist import keras_internals, testing
from tfdist.cluster import progress_file
from tfdist.errors import DesyncError
from tfdist.trainer.options import Checks, Schedule
from tfdist.trainer.replica_divergence import compare


def flipped(values) -> np.ndarray:
    """Returns a copy with the lowest bit of the last number flipped."""
    found = np.array(values)
    found.view(np.uint8).reshape(-1)[-found.itemsize] ^= 1
    return found


class Flip(keras.callbacks.Callback):
    """Flips one bit of one replica's copy of a variable after a few steps."""

    def __init__(self, trainer, find, replica):
        super().__init__()
        self._trainer, self._find, self._replica = trainer, find, replica

    def on_train_batch_end(self, batch, logs=None):
        if batch == 4:
            [variable] = [v for v in self._trainer.model.optimizer.variables if v.path.endswith(self._find)]
            own = self._trainer.strategy.local(keras_internals.value_of(variable))[self._replica]
            own.assign(flipped(own))


def fit(trainer, steps=12, callbacks=(), **checks):
    return trainer.fit(
        (IMAGES, LABELS),
        batch_size=8,
        steps=steps,
        callbacks=callbacks,
        schedule=Schedule(steps_per_call=5),
        checks=Checks(**checks),
    )


def test_one_bit_of_a_slot(mirrored4, tmp_path, monkeypatch):
    trainer = make_trainer(mirrored4)
    progress_file.create(note := tmp_path / "note")
    monkeypatch.setenv(progress_file.VARIABLE, str(note))
    with pytest.raises(
        DesyncError,
        match=r"before step 5: optimizer/\S*dense_kernel_velocity differs: replica 2 of rank 0 from replica 0 of rank 0, "
        "replica 1 of rank 0, replica 3 of rank 0",
    ):
        fit(trainer, check_sync_every=5, callbacks=[Flip(trainer, "dense_kernel_velocity", 2)])
    assert trainer.step == 5 and progress_file.read(note) == (5, True)


def test_one_bit_on_one_device_of_a_mesh(mesh2x2):
    case = testing.Case(model="mlp", optimizer="sgd")
    trainer = testing.make_trainer(mesh2x2, case)
    trainer.build(testing.source_of(case))
    trainer.fit(testing.source_of(case), batch_size=16, steps=4, checks=Checks(check_sync_every=2))
    variable = keras_internals.value_of(trainer.model.trainable_variables[0])
    parts = [np.array(part) for part in dtensor.unpack(variable.read_value())]
    parts[3] = flipped(parts[3])
    variable.assign(dtensor.pack([tf.constant(p) for p in parts], mesh2x2.devices.layout(variable.mesh_layout)))
    with pytest.raises(
        DesyncError, match=r"differs: (data:1,model:1 of rank 0 from data:0,model:1|.* from data:1,model:1)"
    ):
        trainer.fit(testing.source_of(case), batch_size=16, steps=4, checks=Checks(check_sync_every=4))


def test_processes_that_differ_are_named_on_all_of_them():
    """The first variable that differs is named; hashes are by variable and block."""
    hashes = [
        {"a": {"replica 0": "1"}, "b": {"replica 0": "2"}, "c at [4]": {"replica 0": "3"}},
        {"a": {"replica 1": "1"}, "b": {"replica 1": "2"}, "c at [4]": {"replica 1": "4"}},
        {"a": {"replica 2": "1"}, "b": {"replica 2": "2"}, "c_1 at [4]": {"replica 2": "3"}},
    ]
    names = [["a", "b", "c"], ["a", "b", "c"], ["a", "b", "c_1"]]  # Keras's counters: rank 2 has created one more
    with members(3) as joined, ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(compare, 7, hashes[m.rank], names[m.rank], m) for m in joined]
        said = [str(call.exception()) for call in calls]
    assert {text.replace("c_1", "c") for text in said} == {said[0]}
    assert (
        "before step 7: c at [4] differs: replica 1 of rank 1 from replica 0 of rank 0, replica 2 of rank 2" in said[0]
    )
