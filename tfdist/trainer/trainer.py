"""`Trainer` trains, evaluates, saves and resumes a Keras model under a strategy."""

import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import keras

from tfdist import keras_internals
from tfdist.checkpoint.best import BestTracker, BestValue, best_checkpoint
from tfdist.checkpoint.format import Checkpoint
from tfdist.checkpoint.manager import Checkpoints, open_saver
from tfdist.checkpoint.replication import RunSnapshot
from tfdist.checkpoint.restore import restore, restore_weights, resume_candidates
from tfdist.config.balance import MEASURED, Balance
from tfdist.config.pipeline import check_without_flush
from tfdist.config.sync import DEFAULT, Sync, parse_sync
from tfdist.config.train_config import check_arguments
from tfdist.coordination.group import long_timeout
from tfdist.data import DatasetSplits, Examples, as_examples
from tfdist.data.batch_schedule import GLOBAL, BatchSchedule
from tfdist.data.inputs import input_examples
from tfdist.data.reading_errors import explain_reading_errors
from tfdist.distribution.strategy import current_strategy
from tfdist.errors import InputError, describe_error, names_arguments
from tfdist.gradients import Clip, LossScale, Reducer
from tfdist.gradients.bucket import BACKWARD, BUCKET_BYTES
from tfdist.gradients.compression import COMPRESSION_MIN_BYTES
from tfdist.models import with_batch_norm
from tfdist.optimizers.catalog import average_weights
from tfdist.pipelining.staged_model import full_model, pipeline_without_flush
from tfdist.reporting import Reporter
from tfdist.reporting.display import terminal_or_plain
from tfdist.reporting.plain_reporter import PlainReporter
from tfdist.row_semantics.explanation import listener
from tfdist.step import validation
from tfdist.step.compression import Compression
from tfdist.step.data_check import explain_mismatch
from tfdist.step.inference import Predictor, concatenate_rows
from tfdist.step.row_dependence import log_no_effect
from tfdist.step.settings import Settings
from tfdist.step.state_store import StateArray, StateStore
from tfdist.storage import AnyPath, StoragePath, path_of, storage_of
from tfdist.synchronization.federated import check_loss_scale, divide_among_clients
from tfdist.trainer.balancing import make_row_allocator, validate_balance
from tfdist.trainer.callbacks import callbacks_of_process, check_callback_weights, run_evaluation
from tfdist.trainer.data_warnings import check_evaluation, check_standalone_evaluation
from tfdist.trainer.early_stopping import check_monitored_metrics
from tfdist.trainer.fit_arguments import (
    DEFAULT_BATCH_SIZE,
    FitArguments,
    check_fit,
    check_targets,
    check_trainer,
    evaluation_arguments,
    fit_arguments,
    validate_callbacks,
    validate_count,
)
from tfdist.trainer.fit_loop import FitLoop
from tfdist.trainer.options import Checks, FitOptions, Reporting, Schedule
from tfdist.trainer.program import Program
from tfdist.trainer.records import History
from tfdist.trainer.train_state import TrainState


def _as_list(metrics: Any) -> Any:
    return list(metrics) or None if isinstance(metrics, tuple) else metrics or None


def expects_one_hot_targets(model: keras.Model) -> bool | None:
    """Returns whether a compiled model's loss takes one-hot vectors rather than class indices; None if unknown."""
    loss_names = [keras_internals.loss_form(loss)[0] for loss in keras_internals.user_losses(model)]
    names = {name.replace("_", "").lower() for name in loss_names}  # names of functions or classes
    if len(names) != 1 or "" in names:
        return None
    return names != {"sparsecategoricalcrossentropy"}


def save_model(model: keras.Model, path: AnyPath) -> None:
    """Atomically writes a model that Keras can load; see `Trainer.save`."""
    with storage_of(path).staged(path_of(path)) as local_path, keras_internals.weights_in_file():
        if validation.synchronized_layers(model):
            model = with_batch_norm(model, "local")  # compiled with an equal optimizer
        if "tfdist" in str(keras.saving.serialize_keras_object(getattr(model, "optimizer", None))):
            with keras_internals.patched((model, "compiled", False)):  # to be loaded without its optimizer
                model.save(str(local_path))
        else:
            model.save(str(local_path))


def check_verbose(verbose: int | str) -> None:
    """Raises `InputError` for an unknown value of `verbose`."""
    if verbose not in ("auto", 0, 1, 2):
        raise InputError(f"`verbose` must be one of 'auto', 0, 1 and 2. Received: {verbose!r}.")


def _parse_verbosity(verbose: int | str) -> int:
    """Returns 0, 1 or 2; for "auto", 1 (a progress bar) in a terminal, otherwise 2 (one line)."""
    check_verbose(verbose)
    return int(verbose) if verbose != "auto" else 1 if sys.stdout.isatty() else 2


def _show_progress(batches: Iterator[Any], count: int, verbose: int) -> Iterator[Any]:
    bar = keras.utils.Progbar(count, verbose=verbose) if verbose else None
    for number, batch in enumerate(batches, 1):
        yield batch
        if bar:
            bar.update(number)


@contextlib.contextmanager
def reporting_context(reporting: Reporting, verbose: int | str, is_chief: bool) -> Iterator[Reporting]:
    """Context with the reporter that `verbose` selects (see `Trainer.fit`), unless `reporting` has one.

    Raises `InputError` if `verbose` is invalid.
    """
    check_verbose(verbose)
    if not verbose or not is_chief or listener() or type(reporting.reporter) is not Reporter:
        yield reporting
        return
    reporter = PlainReporter(sys.stderr) if verbose == 2 else terminal_or_plain(sys.stderr)
    try:
        yield dataclasses.replace(reporting, reporter=reporter)
    except BaseException as error:
        reporter.close(describe_error(error))
        raise
    reporter.close("")


def run_snapshot(program: Program, state: TrainState, batches: BatchSchedule, copied: bool) -> RunSnapshot:
    """Returns the current state for a checkpoint; every process must call it.

    If `copied` is false, training must wait until the checkpoint is written.
    """
    variables = program.run_variables(state.callbacks)
    variables.collect()
    callbacks, arrays = state.callbacks.save()
    values = {
        **state.values(batches),
        "compression": dict(program.steps.overrides),
        "all_reduce_table": program.steps.all_reduce_table,
        "replicas": program.strategy.replicas,
        "strategy": program.strategy.name,
        "order": variables.order,
        "exchanges": program.synchronizer.to_json(),
        "callbacks": callbacks,
    }
    best_steps = [state.best_tracker.best.step] if state.best_tracker and state.best_tracker.best else []
    return RunSnapshot(
        state.step, program.settings.seed, [*variables.parts(copied), *arrays], values, variables, keep_steps=best_steps
    )


class Trainer:
    """Trains a Keras model under the current strategy.

    The model, the optimizer and the metrics are ordinary Keras objects, created in the strategy's scope. Gradients are
    reduced exactly once. Step k is one update with a global batch of `batch_size` examples, a function of (seed, k).
    """

    @names_arguments
    def __init__(
        self,
        model: keras.Model,
        *,
        optimizer: keras.Optimizer | str,
        loss: Any = None,
        metrics: Any = None,
        weighted_metrics: Any = None,
        loss_weights: Any = None,
        seed: int = 0,
        jit_compile: bool = False,
        accumulate_steps: int = 1,
        loss_scale: LossScale | None = None,
        max_skipped_steps: int = 50,
        clip: Clip | None = None,
        ema: float = 0.0,
        compression: str | Reducer = "none",
        compression_min_bytes: int = COMPRESSION_MIN_BYTES,
        bucket_bytes: int = BUCKET_BYTES,
        bucket_order: str = BACKWARD,
        sync: str | Sync = DEFAULT,
        balance: str = "equal",
    ):
        """Compiles the model.

        Args:
          model: Keras model, built or not, created under the strategy's scope.
          optimizer: Keras optimizer. Its clipping applies to reduced gradients. A `LossScaleOptimizer` is unwrapped, and
            its settings are used. An optimizer that accumulates gradients itself is rejected.
          loss: as for `keras.Model.compile`; may be None if layers call `add_loss`.
          metrics: as for `keras.Model.compile`.
          weighted_metrics: as for `keras.Model.compile`.
          loss_weights: as for `keras.Model.compile`.
          seed: seed of the order of examples and of random layers.
          jit_compile: whether to compile the forward and backward pass with XLA.
          accumulate_steps: number of micro-steps into which a replica splits its rows; affects memory and time, not the result.
          loss_scale: loss scaling; by default dynamic if a layer computes in float16, else none.
          max_skipped_steps: number of consecutive steps skipped because of overflow that ends the run.
          clip: clipping of the reduced gradients.
          ema: momentum of an exponential moving average of the weights, such as 0.999; 0 for none. `evaluate`, `predict`,
            `save` and evaluations during `fit` use the average; checkpoints contain both. See `averaged_weights`.
          compression: compression of the gradients that are summed over replicas: as in `--compression`, or a `Reducer`.
          compression_min_bytes: gradients smaller than this many bytes are summed exactly.
          bucket_bytes: small gradients are sent together in messages of at most this many bytes.
          bucket_order: order in which gradients are sent: "backward", as the backward pass computes them; or "smallest".
          sync: synchronization of weights between replicas, as in `--sync`, such as "local_sgd(period=8)"; `compression`
            then applies to the changes of the weights since the last exchange. "every_step" sums gradients in every step.
          balance: allocation of rows to replicas: "equal", "measured" (by speed) or "weights(2,1,1)"; affects only time.
        """
        numbers = {"seed": seed, "accumulate_steps": accumulate_steps, "max_skipped_steps": max_skipped_steps}
        options: dict[str, Any] = {"ema": ema, "clip": clip, "loss_scale": loss_scale, "compression": compression}
        options |= {"sync": sync, "balance": balance, "bucket_order": bucket_order}
        check_trainer(model, optimizer, loss, (metrics, weighted_metrics), numbers | options)
        self._has_loss = loss is not None
        self.strategy = current_strategy()
        self.model = model = self.strategy.parts.local_part(model)
        self.train_state = TrainState(self.strategy.is_chief)
        buckets: dict[str, Any] = {"bucket_bytes": bucket_bytes, "bucket_order": bucket_order}
        self._compression = Compression(methods=compression, min_bytes=compression_min_bytes, **buckets)
        sync = parse_sync(sync) if isinstance(sync, str) else sync
        check_arguments(
            self.strategy.name,
            self.strategy.declaration,
            sync,
            jit_compile=jit_compile,
            accumulate_steps=accumulate_steps,
            ema=ema,
            compression=compression if isinstance(compression, str) else type(compression).__name__,
            balance=balance,
            shard="optimizer" if self.strategy.optimizer_shards.parts > 1 else "none",
        )
        self._balance = validate_balance(balance, self.strategy)
        validation.check_created_in_scope(self.strategy, "model", model.variables)
        if isinstance(optimizer, keras.Optimizer):
            validation.check_created_in_scope(self.strategy, "optimizer", optimizer.variables)
        optimizer, optimizer_scale = validation.unwrap_loss_scale(keras.optimizers.get(optimizer))
        validation.check_not_wrapped(optimizer)
        validation.check_optimizer(optimizer, clip or Clip())
        average_weights(optimizer, ema)
        model.compile(
            optimizer=optimizer,
            loss=loss,
            loss_weights=loss_weights,
            metrics=_as_list(metrics),
            weighted_metrics=_as_list(weighted_metrics),
            jit_compile=False,
            auto_scale_loss=False,
        )
        if not self.strategy.trains_whole_model:
            validation.check_own_gradients(optimizer)
        loss_scale = loss_scale or optimizer_scale or validation.default_loss_scale(full_model(model))
        self._settings = settings = Settings(
            batch_size=0,
            seed=seed,
            jit_compile=jit_compile,
            micro_steps=accumulate_steps,
            clip=clip or Clip(),
            loss_scale=loss_scale,
            max_skipped_steps=max_skipped_steps,
            sync=sync,
        )
        check_loss_scale(settings)
        if pipeline := pipeline_without_flush(self.strategy):
            check_without_flush(
                pipeline.schedule.name,
                clip_norm=settings.clip.norm,
                loss_scale=str(loss_scale or ""),
                shared=next((variable.path for variable, _ in model.cut.shared), ""),
            )
        self._optimizer = model.optimizer
        self._store = StateStore(self.strategy)
        self._store.variables(self._settings.scale_state())
        self._program: Program | None = None
        self._predictor: Predictor | None = None
        self._is_evaluation_checked = False

    def __repr__(self) -> str:
        return f"<Trainer of {self.model.name!r} on {self.strategy!r}, step {self.step}>"

    @names_arguments
    def fit(
        self,
        x: Any,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int | None = None,
        verbose: int | str = "auto",
        callbacks: Sequence[keras.callbacks.Callback] | None = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: Mapping[int, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | Collection[int] = 1,
        *,
        steps: int | None = None,
        schedule: Schedule | None = None,
        checks: Checks | None = None,
        reporting: Reporting | None = None,
        checkpoints: Checkpoints | None = None,
    ) -> History:
        """Trains for a number of epochs or steps, counted from the start of the resumed run after `resume`.

        The first arguments are those of Keras's `fit`. Every batch is full: the remaining rows of an epoch are combined with
        the first rows of the next one, whereas Keras uses a smaller last batch. The first batch continues at the position
        in the data at which the previous `fit` ended.

        Args:
          x: inputs, as an array or a list, tuple or dict of arrays, with `y`; or all of the data: arrays (x, y); a
            `tf.data.Dataset`, `keras.utils.PyDataset` or generator of batches, whose rows are used in their order, which must
            be the same on every process; a `tf.data.Dataset` of unbatched examples, which is shuffled; a source; a
            `DatasetSplits`; or a pair of these for training and validation. tf.data's autotuning is disabled, because its
            thread delays the end of a run by up to a minute: `AUTOTUNE` then means one parallel call per core.
          y: targets, as arrays.
          batch_size: global batch size, over all replicas; defaults to the size of the first batch of `x`, or 32.
          epochs: number of passes over the data, including those before `initial_epoch`; by default 1 without `steps`.
          verbose: output of the chief to stderr: "auto" or 1, a progress bar in a terminal and lines elsewhere; 2, lines;
            0, nothing. Has no effect with `reporting.reporter`.
          callbacks: a Keras callback or a list of them, the same on every process. Checkpoints contain their `state_dict`.
          validation_split: fraction of the arrays, in [0, 1), to use as validation data: their last rows.
          validation_data: data to evaluate as scheduled, in any of the forms of `x`.
          shuffle: whether to shuffle arrays, sources and unbatched examples in each epoch, using the trainer's seed.
          class_weight: weight of the examples of each class. As in Keras, labels are rounded, and the class of a vector of
            more than one element is its argmax. With `sparse_categorical_crossentropy`, or integers and a custom loss, such a
            vector has a class index for each token.
          sample_weight: weight of each example, as an array, with `y`.
          initial_epoch: index of the first epoch, for callbacks.
          steps_per_epoch: steps that count as an epoch; required for infinite data.
          validation_steps: number of batches to evaluate; by default all.
          validation_batch_size: global batch size of evaluations; does not affect results.
          validation_freq: epochs between evaluations, or a list of epochs, counted from 1, after which to evaluate.
          steps: number of updates, instead of `epochs`.
          schedule: steps of records, evaluations and calls of the compiled loop.
          checks: measurements and checks.
          reporting: destinations of records.
          checkpoints: options for saving the run; by default it is not saved.

        Returns:
          The records of the run; as in Keras, `history` has the results of each epoch.

        Raises:
          InputError: an argument is invalid.
          NotFiniteError: a loss is inf or NaN; the message names the step.
          Preempted: the process received SIGTERM or SIGINT; the run was saved according to `checkpoints`. Ctrl-C in the
            terminal raises the subclass `Interrupted`.
          CheckpointError: a checkpoint could not be written.
          DesyncError: replicas have diverged.
        """
        callbacks = check_fit(callbacks, class_weight, schedule, checks, reporting, checkpoints)
        length: dict[str, Any] = {"epochs": epochs, "steps": steps, "steps_per_epoch": steps_per_epoch}
        length |= {"initial_epoch": initial_epoch, "batch_size": batch_size}
        length |= {"validation_steps": validation_steps, "validation_freq": validation_freq}
        with long_timeout("its data") as deadline:
            self.strategy.group.agree("fit/length", {name: str(n) for name, n in length.items()}, "", deadline)
        arguments = fit_arguments(
            x,
            y,
            **length,
            validation_split=validation_split,
            validation_data=validation_data,
            shuffle=shuffle,
            class_weight=class_weight,
            one_hot=expects_one_hot_targets(self.model),
            sample_weight=sample_weight,
            validation_batch_size=validation_batch_size,
        )
        schedule = schedule or Schedule()
        strategy, sync = self.strategy, self._settings.sync
        check_arguments(strategy.name, strategy.declaration, sync, elastic_batch=schedule.elastic_batch)
        data, size = arguments.data, arguments.data.train.size
        labeled_data = [(data.train, "training data")]
        labeled_data += [] if data.test is None else [(data.test, "validation data")]
        for examples, label in labeled_data:
            check_targets(self._has_loss, examples.element_spec, label)
        batches = self.batch_schedule(size, batch_size=arguments.batch_size, elastic_batch=schedule.elastic_batch)
        if self._program:
            validation.check_unchanged(self.model, self._program.trainable_ids, self._optimizer)
        for examples, label in labeled_data:
            validation.check_same_data(self.strategy, examples, label)
        with reporting_context(reporting or Reporting(), verbose, self.strategy.is_chief) as reporting:
            options = FitOptions(schedule, checks or Checks(), reporting, checkpoints)
            return self._fit(self.build(data.train), arguments, batches, callbacks, options)

    def _fit(
        self,
        program: Program,
        arguments: FitArguments,
        batches: BatchSchedule,
        callbacks: Sequence[keras.callbacks.Callback],
        options: FitOptions,
    ) -> History:
        check_callback_weights(callbacks, program)
        strategy, state, checkpoints = self.strategy, self.train_state, options.checkpoints
        sync, seed = self._settings.sync, self._settings.seed
        train = divide_among_clients(sync, arguments.data.train, arguments.batch_size, seed)
        data = dataclasses.replace(arguments.data, train=train)
        balance = self._balance
        if balance.kind == MEASURED and program.metrics.division == "whole":
            log_no_effect(f"--balance={balance}", program.model, program.dependence.reasons[0], strategy)
            balance = Balance()
        best = checkpoints.best if checkpoints else ""
        best_metric = check_monitored_metrics(callbacks, best, program, data.test is not None)
        state.best_tracker = None
        if checkpoints and best:
            state.best_tracker = BestTracker(checkpoints.directory, *best_metric, state.initial_best)

        def take_snapshot() -> RunSnapshot:
            return run_snapshot(program, state, batches, checkpoints is None or checkpoints.in_background)

        def synchronize() -> None:
            options.reporting.ledger.sync()
            options.reporting.reporter.sync()

        opened_saver = open_saver(checkpoints, strategy, state.step, take_snapshot, synchronize, state.best_tracker)
        with options.checks.watchdog(strategy.group) as watchdog, opened_saver as saver:
            row_allocator = make_row_allocator(balance, strategy, state, batches.position.batch_size)
            arguments = arguments._replace(data=data)
            loop = FitLoop(program, state, arguments, batches, callbacks, options, saver, row_allocator, watchdog)
            try:
                return loop.run()
            finally:
                state.end_run(batches, train.size)

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
        """Returns the loss and the metrics over a dataset, the same for any number of replicas.

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
          InputError: an argument is invalid, the data does not fit the model, or, with pipeline stages or tensor layouts,
            results would differ from those on one device: a loss is not a mean over rows, a metric is not a sum, or outputs
            depend on several rows.
        """
        verbose = _parse_verbosity(verbose)
        if return_dict is not True:
            raise InputError(
                f"Trainer.evaluate returns a dict of results by name. Received: return_dict={return_dict!r}. Remove it."
            )
        callbacks = callbacks_of_process(validate_callbacks(callbacks), self.strategy)
        examples, batch_size = evaluation_arguments(x, y, batch_size, sample_weight, steps)
        check_targets(self._has_loss, examples.element_spec, "data to evaluate")
        validation.check_same_data(self.strategy, examples, "data to evaluate")
        count = -(-examples.size // batch_size)
        bar = keras.utils.Progbar(count, verbose=2 if verbose and self.strategy.is_chief else 0)  # starts its clock
        program = self.build(examples)
        check_evaluation(self.strategy, self.model, program.element_spec, examples.element_spec)
        if not (self._is_evaluation_checked or program.steps.has_loop):  # `fit` has checked its examples
            check_standalone_evaluation(self.strategy, program.dependence)
            self._is_evaluation_checked = True
        check_callback_weights(callbacks, program)
        callback_list = keras.callbacks.CallbackList(callbacks, model=self.model, epochs=1, steps=count, verbose=0)
        evaluate = functools.partial(program.evaluate, examples, batch_size, self.step)
        results = run_evaluation(callback_list, count, evaluate)
        bar.update(count, results.items())
        return results

    @names_arguments
    def predict(
        self, x: Any, batch_size: int | None = None, verbose: int | str = "auto", steps: int | None = None
    ) -> Any:
        """Returns the outputs for all rows, in order; must be called on every process, and returns all rows on each.

        With `ema`, the averaged weights are used.

        Args:
          x: an array, or a list or dict of arrays for a model with several inputs; a `tf.data.Dataset`, with or without
            targets; or other data in a form of `fit`, whose targets are ignored. For a `DatasetSplits`, the test
            examples are used.
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
        examples = input_examples(x, steps, batch_size or DEFAULT_BATCH_SIZE)
        validation.check_same_data(self.strategy, examples, "data to predict for")
        rows = batch_size or examples.batch_size or DEFAULT_BATCH_SIZE
        limit = min(examples.size, (steps or examples.size) * (examples.batch_size or rows))
        if self._predictor is None:
            if self._program is None:
                self._build_model(examples)
            division = self._program.output_division if self._program is not None else "own"
            self._predictor = Predictor(self.model, self.strategy, self._settings.seed, division)
        weights_context = self._program.evaluated_weights(self.step) if self._program else contextlib.nullcontext()
        count, chief_verbosity = -(-limit // rows), verbose if self.strategy.is_chief else 0
        predictor = self._predictor

        def predict() -> Any:
            return concatenate_rows(_show_progress(predictor.predict(examples, rows, limit), count, chief_verbosity))

        with weights_context, explain_reading_errors(examples):
            return self.strategy.with_all_replicas(predict)

    def _build_model(self, examples: Examples) -> None:
        if not self.model.built:
            specs = examples.element_spec[:1]
            x = keras.tree.map_structure(lambda s: keras.KerasTensor([None, *s.shape], s.dtype.name), specs[0])
            with self.strategy.scope(), explain_mismatch(specs):
                self.model(x, training=False)
        self.strategy.synchronize(self.model.variables)

    @names_arguments
    def resume(self, path: AnyPath, commits: str | os.PathLike[str] = "") -> int:
        """Resumes from a checkpoint: restores weights, optimizer state, the step and all other state of the run.

        Must be called on every process, with the model built. Uses the newest intact checkpoint, and renames damaged ones.

        Args:
          path: path or URL of a checkpoint, or of a directory of checkpoints, which may be empty or not exist.
          commits: directory of in-memory checkpoints, which are used if they are newer.

        Returns:
          The step, that is, the number of completed updates; 0 if there is no checkpoint.

        Raises:
          InputError: the checkpoint has another model or optimizer, or was written by a newer version.
          CheckpointError: there are checkpoints, but none is intact.
        """
        return self.resume_from(resume_candidates(self.strategy, path, commits))

    def resume_from(self, checkpoints: Sequence[str], *, rename_damaged: bool = True) -> int:
        """Same as `resume`, from the first intact checkpoint; with `rename_damaged`, damaged ones are renamed."""
        variables = self.program.run_variables(self.train_state.callbacks)
        checkpoint = restore(variables, checkpoints, self.strategy.group, rename_damaged)
        if checkpoint is not None:
            self._resume_state(checkpoint)
        return self.step

    def load_weights(self, path: StoragePath, *, with_optimizer: bool) -> None:
        """Restores the weights of one checkpoint for an evaluation; see `restore_weights`."""
        variables = self.program.run_variables(self.train_state.callbacks)
        self._resume_state(restore_weights(variables, path, with_optimizer))

    def _resume_state(self, checkpoint: Checkpoint) -> None:
        self.train_state.resume(checkpoint)
        self.program.resume(checkpoint.values, self.step)

    def batch_schedule(self, size: int, *, batch_size: int, elastic_batch: str = GLOBAL) -> BatchSchedule:
        """Returns the batch size and data position with which `fit` would continue, without changing the state.

        Args:
          size: number of examples per epoch.
          batch_size: see `fit`; in federated learning, a step of the schedule has the examples of a round.
          elastic_batch: see `Schedule`.

        Raises:
          InputError: the batch cannot be divided among the replicas.
        """
        parts = self.strategy.batch_parts
        batch_size = self._settings.sync.examples_per_step(size, batch_size)
        schedule = self.train_state.batch_schedule(size, batch_size, parts, elastic_batch)
        self.strategy.check_batch_size(schedule.position.batch_size, self._settings.micro_steps)
        return schedule

    @names_arguments
    def build(self, data: Any) -> Program:
        """Creates all variables and synchronizes them between replicas, if necessary; returns the program.

        Args:
          data: training data in any of the forms of `fit`; arrays as a tuple (x, y).
        """
        if self._program is None:
            spec = (data.train if isinstance(data, DatasetSplits) else as_examples(data)).element_spec
            self._program = Program(self.model, self.strategy, self._settings, self._compression, self._store, spec)
        return self._program

    @property
    def program(self) -> Program:
        """The built model with its compiled functions.

        Raises:
          InputError: `build` has not been called.
        """
        if self._program is None:
            raise InputError(
                "The model must be built before a run is resumed, and before the model is saved. Received a model that is not "
                "built. Call trainer.build(data)."
            )
        return self._program

    @property
    def step(self) -> int:
        """Number of completed updates."""
        return self.train_state.step

    @property
    def loss_scale(self) -> float | None:
        """The current loss scale; None without loss scaling."""
        return self._store.loss_scale

    @property
    def state(self) -> dict[str, StateArray]:
        """State of the step other than weights and optimizer state, by name, such as error feedback and the loss scale."""
        return self._store.arrays()

    @property
    def best(self) -> BestValue | None:
        """The best value so far of the metric in `Checkpoints.best`, and its step; None if there is none."""
        return self.train_state.best_tracker.best if self.train_state.best_tracker else None

    def load_best(self) -> BestValue | None:
        """Restores the best step of the last `fit` from its checkpoint; must be called on every process.

        Returns:
          The best value. If its checkpoint does not exist or is damaged, logs a warning, changes nothing and returns None.

        Raises:
          InputError: the last `fit` had no `Checkpoints.best`, or did not measure its metric.
        """
        best, path = best_checkpoint(self.train_state.best_tracker, self.step, self.strategy.group)
        if path:
            self.resume_from([path], rename_damaged=False)
        return best

    def averaged_weights(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which the model has the weights that are evaluated, averaged by `ema` and over replicas.

        Every process must enter it.
        """
        return self.program.evaluated_weights(self.step)

    def save(self, path: AnyPath) -> None:
        """Saves the model atomically in Keras's format on the chief; must be called on every process.

        Keras can load the file, with tfdist imported if the model has layers of tfdist. Synchronized BatchNorm is saved as
        ordinary BatchNorm, which is equal in inference. The optimizer is saved unless a layer was replaced in this way, or the
        optimizer is from tfdist or has a warmup. With `ema`, the average is saved.
        """
        with self.averaged_weights(), self.strategy.parts.full_model(self.model) as model:
            if self.strategy.is_chief:
                save_model(model, path)
