"""`Trainer.evaluate` and `Trainer.predict`."""

import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from tfdist.data import Examples
from tfdist.data.inputs import input_examples
from tfdist.data.reading_errors import explain_reading_errors
from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError, names_arguments
from tfdist.step.data_check import explain_mismatch
from tfdist.step.prediction import Predictor, concatenate_rows
from tfdist.step.settings import Settings
from tfdist.step.validation import check_same_data
from tfdist.trainer.callbacks import callbacks_of_process, check_no_swap, run_evaluation
from tfdist.trainer.data_warnings import check_standalone_evaluation
from tfdist.trainer.fit_arguments import (
    BATCH_SIZE,
    check_targets,
    evaluation_arguments,
    validate_callbacks,
    validate_count,
)
from tfdist.trainer.program import Program

_AUTO = "auto"


class EvaluationMixin:
    """`evaluate` and `predict` of a trainer, also for an untrained model."""

    model: keras.Model
    strategy: Strategy
    _settings: Settings
    _program: Program | None
    _has_loss: bool
    _predictor: Predictor | None = None
    _is_evaluation_checked: bool = False

    @property
    def step(self) -> int:
        """Number of completed updates."""
        raise NotImplementedError

    def build(self, data: Any) -> Program:
        """See `Trainer.build`."""
        raise NotImplementedError

    @names_arguments
    def evaluate(
        self,
        x: Any,
        y: Any = None,
        batch_size: int | None = None,
        verbose: int | str = 0,
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Sequence[keras.callbacks.Callback] | None = None,
        *,
        return_dict: bool = True,
    ) -> dict[str, float]:
        """Returns the loss and the metrics over a data set, the same for any number of replicas.

        Args:
          x: data to evaluate on, in any of the forms of `fit`.
          y: targets, as arrays.
          batch_size: examples per batch, over all replicas; affects only the result of a loss with `reduction="sum"`.
            Defaults to the size of the first batch of `x`, or 32.
          verbose: 0 (silent), or "auto", 1 or 2: the chief writes a line with the results to stdout.
          sample_weight: weight of each example, as an array, with `y`.
          steps: number of batches to evaluate; by default all.
          callbacks: a Keras callback or a list of them. They see all batches as a single batch; callbacks that write files
            run on the chief only.
          return_dict: must be True, which is not Keras's default.

        Raises:
          InputError: an argument is invalid, the data does not fit the model, or, with stages or layouts, results would
            differ from one device: a loss is not a mean over rows, a metric is not a sum, or outputs depend on several rows.
        """
        verbose = _parse_verbosity(verbose)
        if return_dict is not True:
            raise InputError(
                f"Trainer.evaluate returns a dict of results by name. Received: return_dict={return_dict!r}. Leave it out."
            )
        callbacks = callbacks_of_process(validate_callbacks(callbacks), self.strategy)
        examples, batch_size = evaluation_arguments(x, y, batch_size, sample_weight, steps)
        check_targets(self._has_loss, examples.element_spec, "data to evaluate")
        check_same_data(self.strategy, examples, "data to evaluate")
        count = -(-examples.size // batch_size)
        bar = keras.utils.Progbar(count, verbose=2 if verbose and self.strategy.is_chief else 0)  # starts its clock
        program = self.build(examples).for_evaluation(examples)
        if not (self._is_evaluation_checked or program.steps.has_loop):  # `fit` has checked its examples
            check_standalone_evaluation(self.strategy, self.model, program.dependence)
            self._is_evaluation_checked = True
        check_no_swap(callbacks, program)
        callback_list = keras.callbacks.CallbackList(callbacks, model=self.model, epochs=1, steps=count, verbose=0)
        results = run_evaluation(
            callback_list, count, functools.partial(program.evaluate, examples, batch_size, self.step)
        )
        bar.update(count, results.items())
        return results

    @names_arguments
    def predict(
        self, x: Any, batch_size: int | None = None, verbose: int | str = _AUTO, steps: int | None = None
    ) -> Any:
        """Returns the outputs for all rows, in order. Call it on every process; each gets all rows.

        With `ema`, the averaged weights are used.

        Args:
          x: an array, or a list or dict of arrays for a model with several inputs; a `tf.data.Dataset`, with or without
            targets; or other data in a form of `fit`, whose targets are ignored. The test examples of a `DataSet` are used.
          batch_size: examples per batch, over all replicas; does not affect the result. Defaults to the size of the
            first batch of `x`, or 32.
          verbose: "auto", 0 (silent), 1 (a progress bar) or 2 (one line); as for Keras's `predict`.
          steps: maximum number of batches; required if `x` is infinite.

        Returns:
          An array [rows, ...], or a structure of them for a model with several outputs.

        Raises:
          InputError: an argument is invalid, or the data does not fit the model.
        """
        batch_size, steps = validate_count("batch_size", batch_size), validate_count("steps", steps)
        verbose = _parse_verbosity(verbose)
        examples = input_examples(x, steps, batch_size or BATCH_SIZE)
        check_same_data(self.strategy, examples, "data to predict for")
        rows = batch_size or examples.batch_size or BATCH_SIZE
        limit = min(examples.size, (steps or examples.size) * (examples.batch_size or rows))
        if self._predictor is None:
            if self._program is None:
                self._build_model(examples)
            division = self._program.output_division if self._program is not None else "own"
            self._predictor = Predictor(self.model, self.strategy, self._settings.seed, division)
        weights_context = self._program.evaluated_weights(self.step) if self._program else contextlib.nullcontext()
        count, chief_verbosity = -(-limit // rows), verbose if self.strategy.is_chief else 0
        predictor = self._predictor
        with weights_context, explain_reading_errors(examples):
            return self.strategy.with_all_replicas(
                lambda: concatenate_rows(
                    _show_progress(predictor.predict(examples, rows, limit), count, chief_verbosity)
                )
            )

    def _build_model(self, examples: Examples) -> None:
        if not self.model.built:
            x = keras.tree.map_structure(
                lambda spec: keras.KerasTensor([None, *spec.shape], spec.dtype.name), examples.element_spec[0]
            )
            with self.strategy.scope(), explain_mismatch(examples.element_spec[:1]):
                self.model(x, training=False)
        self.strategy.synchronize(self.model.variables)


def check_verbose(verbose: int | str) -> None:
    """Raises `InputError` for an unknown value of `verbose`."""
    if verbose not in (_AUTO, 0, 1, 2):
        raise InputError(f"`verbose` must be one of 'auto', 0, 1 and 2. Received: {verbose!r}.")


def _parse_verbosity(verbose: int | str) -> int:
    """Returns 0, 1 or 2; for "auto", 1 (a progress bar) in a terminal, otherwise 2 (one line)."""
    check_verbose(verbose)
    return int(verbose) if verbose != _AUTO else 1 if sys.stdout.isatty() else 2


def _show_progress(batches: Iterator[Any], count: int, verbose: int) -> Iterator[Any]:
    bar = keras.utils.Progbar(count, verbose=verbose) if verbose else None
    for number, batch in enumerate(batches, 1):
        yield batch
        if bar:
            bar.update(number)
