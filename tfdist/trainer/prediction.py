"""`Trainer.predict`: the predictions of a model for data without targets."""

import sys
from collections.abc import Iterator
from typing import Any

import keras

from tfdist.data import Examples
from tfdist.data.inputs import input_examples
from tfdist.distribution.strategy import HasCollectives
from tfdist.errors import InputError
from tfdist.step.data_mismatch import must_fit
from tfdist.step.prediction import Predictor, concatenated

_BATCH_SIZE = 32  # Keras's default
AUTO = "auto"


class Prediction:
    """Predicts with the model of a trainer, which need not have been trained."""

    def __init__(self, model: keras.Model, strategy: HasCollectives, seed: int):
        """Initializes with the model of a trainer, which may not have been built yet."""
        self._model, self._strategy, self._seed = model, strategy, seed
        self._predictor: Predictor | None = None

    def predict(
        self, x: Any, batch_size: int | None, verbose: int | str, steps: int | None, *, is_synchronized: bool
    ) -> Any:
        """See `Trainer.predict`; `is_synchronized`: whether the variables are known to be equal on all replicas."""
        for name, value in (("batch_size", batch_size), ("steps", steps)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise InputError(f"`{name}` must be an integer of at least 1. Received: {value!r}.")
        if verbose not in (AUTO, 0, 1, 2):
            raise InputError(f'`verbose` must be "auto", 0, 1 or 2. Received: {verbose!r}.')
        size = batch_size or _BATCH_SIZE
        most = None if steps is None else steps * size
        examples = input_examples(x, most)
        if self._predictor is None:
            if not is_synchronized:
                self._build(examples)
            self._predictor = Predictor(self._model, self._strategy, self._seed)
        batches = self._predictor.predict(examples, size, most)
        count = -(-(examples.size if most is None else min(examples.size, most)) // size)
        return concatenated(_shown(batches, count, _verbosity(verbose) if self._strategy.is_chief else 0))

    def _build(self, examples: Examples) -> None:
        """Creates the model's variables, unless it was built, and makes them equal on all replicas."""
        if not self._model.built:
            x = keras.tree.map_structure(
                lambda spec: keras.KerasTensor([None, *spec.shape], spec.dtype.name), examples.element_spec[0]
            )
            with self._strategy.scope(), must_fit(examples.element_spec[:1]):
                self._model(x, training=False)
        self._strategy.synchronize(self._model.variables)


def _verbosity(verbose: int | str) -> int:
    """Returns 1 (a progress bar) for auto in a terminal, else 2 (one line)."""
    return int(verbose) if verbose != AUTO else 1 if sys.stdout.isatty() else 2


def _shown(batches: Iterator[Any], count: int, verbose: int) -> Iterator[Any]:
    bar = keras.utils.Progbar(count, verbose=verbose) if verbose else None
    for number, batch in enumerate(batches, 1):
        yield batch
        if bar:
            bar.update(number)
