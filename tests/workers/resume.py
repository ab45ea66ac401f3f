"""Saves a case under its own name in a directory, waits until every saver has done so, and resumes from each."""

import pathlib
from typing import Any

import keras
import numpy as np

import tfdist
from tests.waiting import wait_for
from tfdist import keras_internals, testing
from tfdist.checkpoint.format import Checkpoint, complete_checkpoints

CASES = {
    "transformer": testing.Case(model="transformer", optimizer="adamw"),
    "cnn": testing.Case(model="cnn_frozen", optimizer="sgd"),
    "mlp": testing.Case(model="mlp", optimizer="lamb"),
}
IN_PROCESS = {
    "single": "single",
    "mirrored2": "mirrored2",
    "mirrored4": "mirrored4",
    "2x2": "mesh2x2",
    "1x4": "mesh1x4",
    "4x1": "mesh4x1",
}  # and the tests' fixtures
JOBS = {"multiworker2": 2, "horovod3": 3, "horovod2": 2, "parameter_server2": 2, "pipeline2": 2, "pipeline3": 3}
OPTIONS = {"pipeline2": "(micro_batches=4)", "parameter_server2": "(servers=0)"}  # of the strategies of jobs
SAVED_AT, END = 5, 10


class Calls(keras.callbacks.Callback):
    """Records the rank and the last step of each call of the loop; a resumed run restores those of rank 0."""

    def __init__(self, strategy: tfdist.Strategy):
        super().__init__()
        self.rank = strategy.group.rank
        self.seen: list[tuple[int, int]] = []

    def on_train_begin(self, logs: Any = None) -> None:
        self.seen = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append((self.rank, batch + 1))

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def save(strategy: tfdist.Strategy, case: str, directory: pathlib.Path) -> tfdist.Trainer:
    trainer = testing.make_trainer(strategy, CASES[case])
    source = testing.source_of(CASES[case])
    checkpoints = tfdist.Checkpoints(directory=str(directory), every=str(SAVED_AT))
    callbacks = [Calls(strategy)]
    trainer.fit(source, batch_size=CASES[case].batch_size, steps=SAVED_AT, checkpoints=checkpoints, callbacks=callbacks)
    return trainer


def go_on(trainer: tfdist.Trainer, case: str, directory: pathlib.Path) -> dict[str, np.ndarray]:
    """Resumes from a checkpoint; returns the final weights. Asserts that the loaded values equal the saved ones bit for bit."""
    assert trainer.resume(directory) == SAVED_AT
    [path] = complete_checkpoints(directory)
    saved = Checkpoint.open(path)
    for prefix, variables in (("model/", trainer.model.variables), ("optimizer/", trainer.model.optimizer.variables)):
        loaded = weights(trainer, variables)
        for name in (name for name in saved.tensors if name.startswith(prefix)):
            if not trainer.strategy.trains_whole_model and name.removeprefix(prefix) not in loaded:
                continue  # of another stage
            assert loaded[name.removeprefix(prefix)].tobytes() == saved.read(name).tobytes(), name
    calls = Calls(trainer.strategy)
    trainer.fit(testing.source_of(CASES[case]), batch_size=CASES[case].batch_size, steps=END, callbacks=[calls])
    assert (calls.seen[0][0], calls.seen[-1]) == (0, (calls.rank, END))
    assert (0, SAVED_AT) in calls.seen, "rank 0's, on every process"
    return weights(trainer, trainer.model.variables)


def weights(trainer: tfdist.Trainer, variables: Any) -> dict[str, np.ndarray]:
    values = [trainer.strategy.local(keras_internals.value_of(variable)) for variable in variables]
    return {v.path: np.asarray(own[0]) for v, own in zip(variables, values, strict=True)}


def work(
    strategy: tfdist.Strategy, directory: pathlib.Path, name: str, case: str, folder: str, *savers: str
) -> dict[str, Any]:
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    home = pathlib.Path(folder)
    trainer = save(strategy, case, home / name)
    wait_for(lambda: all(complete_checkpoints(home / saver) for saver in savers), 200)
    return {saver: go_on(trainer, case, home / saver) for saver in savers}
