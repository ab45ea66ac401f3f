"""`Trainer`: trains, evaluates, saves and resumes a Keras model under a strategy."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.checkpoint.callback_state import NOTHING, CallbackState
from tfdist.checkpoint.manager import Checkpoints, saver
from tfdist.checkpoint.restore import restore, resume_candidates
from tfdist.checkpoint.tiers import Saved
from tfdist.checkpoint.train_state import TrainState
from tfdist.coordination.watchdog import Watchdog
from tfdist.data import Examples, StreamPosition, as_data_set, as_examples, check_batch_size, with_class_weight
from tfdist.data.batch_schedule import GLOBAL, BatchSchedule
from tfdist.diagnostics import Auto, CompressionError, Exposure, GradientNorms, Inspection, ReplicaDivergence, Site
from tfdist.distribution.strategy import current_strategy
from tfdist.errors import InputError
from tfdist.gradients import Clip, LossScale, Reducer
from tfdist.gradients.bucket import BUCKET_BYTES
from tfdist.gradients.compression import COMPRESSION_MIN_BYTES
from tfdist.reporting import NullLedger, NullProfile, NullReporter, Reporter, synchronizer
from tfdist.reporting.schema import check_metric_names
from tfdist.step import metrics
from tfdist.step.compiled_steps import Compression, Steps
from tfdist.step.data_mismatch import must_fit
from tfdist.step.evaluation import Evaluator
from tfdist.step.running_metrics import Progress
from tfdist.step.state_store import StateArray, StateStore
from tfdist.step.step import Settings
from tfdist.step.validation import (
    check_born_here,
    check_length,
    check_micro_steps,
    check_not_wrapped,
    check_optimizer,
    check_same_data,
    check_trains,
    check_unchanged,
    default_loss_scale,
    with_collectives,
    without_loss_scale,
)
from tfdist.storage import AnyPath
from tfdist.trainer.consistency import check_alike
from tfdist.trainer.fit_loop import History, Run, Schedule
from tfdist.trainer.model_file import save_model


class Trainer:
    """Trains a Keras model under the strategy whose scope is open.

    The model, the optimizer and the metrics are ordinary Keras objects, created in the same scope. tfdist reduces
    gradients exactly once. Step k is one update with a global batch of `batch_size` examples, determined by (seed, k).
    """

    def __init__(
        self,
        model: keras.Model,
        *,
        optimizer: keras.Optimizer | str,
        loss: Any = None,
        metrics: Sequence[Any] = (),
        weighted_metrics: Sequence[Any] = (),
        loss_weights: Any = None,
        seed: int = 0,
        jit_compile: bool = False,
        accumulate_steps: int = 1,
        loss_scale: LossScale | None = None,
        max_skipped_steps: int = 50,
        clip: Clip | None = None,
        compression: str | Reducer = "none",
        compression_min_bytes: int = COMPRESSION_MIN_BYTES,
        bucket_bytes: int = BUCKET_BYTES,
    ):
        """Compiles the model.

        Args:
          model: Keras model, built or not, created under the strategy's scope.
          optimizer: Keras optimizer. Its clipping applies to reduced gradients. A `LossScaleOptimizer` is unwrapped and
            its scale taken over. An optimizer that accumulates gradients itself is rejected.
          loss: as for `keras.Model.compile`; may be None if layers call `add_loss`.
          metrics: as for `keras.Model.compile`.
          weighted_metrics: as for `keras.Model.compile`.
          loss_weights: as for `keras.Model.compile`.
          seed: seed of the order of examples and of random layers.
          jit_compile: whether to compile the forward and backward pass with XLA.
          accumulate_steps: micro-steps into which a replica splits its rows; affects memory and time, not the result.
          loss_scale: loss scaling; by default dynamic if a layer computes in float16, else none.
          max_skipped_steps: number of consecutive steps skipped because of overflow that ends the run.
          clip: clipping of the reduced gradients.
          compression: how gradients are summed over replicas: as in `--compression`, or a `Reducer`.
          compression_min_bytes: gradients smaller than this many bytes are summed exactly.
          bucket_bytes: small gradients are sent together in messages of at most this many bytes.
        """
        self.strategy = with_collectives(current_strategy())
        check_born_here(self.strategy, "model", model.variables)
        if isinstance(optimizer, keras.Optimizer):
            check_born_here(self.strategy, "optimizer", optimizer.variables)
        self.model = model
        self.step = 0
        self.progress, self.callback_memory = Progress(), CallbackState()
        self.seed = seed
        self.resumed_from = ""
        self._begun_at: int | None = None
        self._batch_schedule: BatchSchedule | None = None
        self._position: StreamPosition | None = None
        self._compression = Compression(methods=compression, min_bytes=compression_min_bytes, bucket_bytes=bucket_bytes)
        if self.strategy.global_view and (jit_compile or compression != "none"):
            raise InputError(
                "On a mesh the engine compiles and sums gradients by itself: leave out jit_compile and compression. Received: "
                f"jit_compile={jit_compile}, compression={compression!r}."
            )
        optimizer, taken = without_loss_scale(keras.optimizers.get(optimizer))
        clip = clip or Clip()
        check_not_wrapped(optimizer)
        check_optimizer(optimizer, clip)
        model.compile(
            optimizer=optimizer,
            loss=loss,
            metrics=list(metrics) or None,
            weighted_metrics=list(weighted_metrics) or None,
            loss_weights=loss_weights,
            jit_compile=False,
            auto_scale_loss=False,
        )
        self._optimizer = model.optimizer
        self._settings = Settings(
            batch_size=0,
            seed=seed,
            jit_compile=jit_compile,
            micro_steps=accumulate_steps,
            clip=clip,
            loss_scale=loss_scale or taken or default_loss_scale(model),
            max_skipped_steps=max_skipped_steps,
        )
        self._kept = StateStore(self.strategy)
        if self._settings.loss_scale:
            self._kept.variables(self._settings.loss_scale.state())
        self._built = False
        self._trained: list[int] = []

    def fit(
        self,
        data: Any,
        *,
        batch_size: int,
        elastic_batch: str = GLOBAL,
        steps: int = 0,
        epochs: int = 0,
        log_every: int = 10,
        eval_every: int = 0,
        steps_per_call: int = 10,
        callbacks: Sequence[keras.callbacks.Callback] = (),
        class_weight: Mapping[int, float] | None = None,
        reporter: Reporter | None = None,
        profile: NullProfile | None = None,
        measure_every: int = 1000,
        compression_check_every: int = 0,
        compression_max_error: float = 0.0,
        checkpoints: Checkpoints | None = None,
        ledger: NullLedger | None = None,
        check_sync_every: int = 0,
        check_sync: str = "variables",
        stall_warning_seconds: float = 60.0,
        stall_shutdown_seconds: float = 0.0,
    ) -> "History":
        """Trains for a number of steps or epochs; after `resume`, counted from where the resumed run began.

        Args:
          data: a `DataSet`, a source, arrays (x, y), a `tf.data.Dataset` of single examples, or a pair of these for
            training and test; the test data is evaluated as scheduled. tf.data's autotuning is disabled, because its
            thread delays the end of a run by up to a minute: `AUTOTUNE` then means one parallel call per core.
          batch_size: global batch size, over all replicas; the first batch continues where the previous `fit` ended.
          elastic_batch: what stays constant when a run resumes with another number of replicas: "global", the global
            batch and the result; or "replica", the batch per replica: on N replicas instead of N0, batches have
            batch_size / N0 * N examples and the learning rate is multiplied by N / N0.
          steps: number of updates; give either this or `epochs`.
          epochs: number of passes over the data.
          log_every: steps between records of metrics.
          eval_every: steps between evaluations; 0 to evaluate at the end of each epoch.
          steps_per_call: steps per call of the compiled loop; affects speed, never the result.
          callbacks: Keras callbacks, the same on every process.
          class_weight: weight of the examples of each class.
          reporter: reports the run on the chief.
          profile: when to profile.
          measure_every: steps between measurements of exposed communication, the first by step 100; 0: never.
          compression_check_every: steps between comparisons of compressed sums with exact sums; 0: never.
          compression_max_error: relative error above which a gradient is summed exactly from then on; 0: no limit.
          checkpoints: where and how often to save the run; by default never.
          ledger: records the examples that this process uses, for example `tfdist.reporting.LedgerFile`.
          check_sync_every: steps between checks that all replicas hold the same values; 0: never.
          check_sync: "variables", where a difference ends the run, or "gradients", whose norms are logged by replica.
          stall_warning_seconds: a call of the compiled loop that takes this long beyond twice the usual is reported; 0:
            never.
          stall_shutdown_seconds: one that takes this long beyond it ends all processes with exit code 4; 0: never.

        Raises:
          InputError: an argument is invalid.
          NotFiniteError: a loss is inf or NaN; names the step.
          Preempted: the process received SIGTERM or SIGINT; the run was saved according to `checkpoints`.
          CheckpointError: a checkpoint could not be written.
          DesyncError: replicas have diverged.
        """
        whole = as_data_set(data, "data")
        train = whole.train
        batch_schedule = self.batch_schedule(train.size, batch_size=batch_size, elastic_batch=elastic_batch)
        check_length(steps, epochs)
        check_unchanged(self.model, self._trained, self._optimizer)
        check_same_data(self.strategy, train)
        end = batch_schedule.end(steps, epochs, train.size)
        schedule = Schedule(steps=end, log_every=log_every, eval_every=eval_every, steps_per_call=steps_per_call)
        source = with_class_weight(train, class_weight) if class_weight else train
        self.build(source)
        ledger = ledger or NullLedger()

        def inspections(site: Site) -> list[Inspection]:
            choice, several = self.steps.compression.choice, self.strategy.replicas > 1
            chosen = [
                choice and several and Auto(site, choice),
                compression_check_every and CompressionError(site, compression_check_every, compression_max_error),
                measure_every and several and Exposure(site, measure_every),
                check_sync_every and self._sync(site, check_sync_every, check_sync),
            ]
            return [inspection for inspection in chosen if isinstance(inspection, Inspection)]

        def saved() -> Saved:
            state, known = self._run_state(), self.callback_memory.now() if self.strategy.is_chief else NOTHING
            values = self._values(batch_schedule, state.order) | {"callbacks": known.values}
            return Saved(self.step, self.seed, [*state.parts(), *known.parts], values, state)

        group = self.strategy.group
        with (
            Watchdog(group, warning_seconds=stall_warning_seconds, shutdown_seconds=stall_shutdown_seconds) as watchdog,
            saver(checkpoints, self.strategy, self.step, saved, synchronizer(ledger, reporter)) as saving,
        ):
            run = Run(
                self,
                source,
                whole.test,
                batch_schedule,
                schedule,
                callbacks,
                reporter or NullReporter(),
                profile or NullProfile(),
                inspections,
                saving,
                ledger,
                watchdog,
            )
            try:
                return run.go()
            finally:
                self.progress, self._begun_at = Progress(), None
                self._batch_schedule, self._position = None, batch_schedule.position

    def resume(self, path: AnyPath, commits: str | os.PathLike[str] = "") -> int:
        """Resumes from a checkpoint: restores weights, optimizer state, the step and all other state of the run.

        Call it on every process, with the model built. A damaged checkpoint is set aside; the newest intact one is
        used.

        Args:
          path: a checkpoint, or a directory of checkpoints, which may be empty or missing; also as a URL.
          commits: directory of commits; a commit is used if it is newer.

        Returns:
          The step, i.e. the number of updates done; 0 if there is no checkpoint.

        Raises:
          InputError: the checkpoint is of another model or optimizer, or of a newer version.
          CheckpointError: there are checkpoints, but none is intact.
        """
        return self.resume_from(resume_candidates(self.strategy, path, commits))

    def resume_from(self, checkpoints: Sequence[str], *, sets_aside: bool = True) -> int:
        """Same as `resume`, from the first intact of these paths; `sets_aside`: whether to rename damaged ones."""
        checkpoint = restore(self._run_state(), checkpoints, self.strategy.group, sets_aside)
        if checkpoint is not None:
            self.resumed_from = str(checkpoint.path)
            self.step, self._begun_at = checkpoint.step, checkpoint.values["begun_at"]
            self._batch_schedule, self._position = BatchSchedule.of(checkpoint.values), None
            self.progress = Progress(checkpoint.values["progress"])
            self.steps.go_on(checkpoint.values["compression"])
        return self.step

    def batch_schedule(self, size: int, *, batch_size: int, elastic_batch: str = GLOBAL) -> BatchSchedule:
        """Returns the batch size and data position with which `fit` would continue; changes nothing.

        Args:
          size: number of examples per epoch.
          batch_size: see `fit`.
          elastic_batch: see `fit`.

        Raises:
          InputError: the batch cannot be divided among the replicas.
        """
        parts = self.strategy.batch_parts
        begun_at = self.step if self._begun_at is None else self._begun_at
        begun = self._batch_schedule or BatchSchedule.begun(
            self._position or StreamPosition(batch_size), begun_at, size, batch_size, parts
        )
        found = begun.on(parts, self.step, batch_size, elastic_batch)
        micro_steps, equal = self._settings.micro_steps, self.strategy.compiles_replicas
        check_batch_size(found.position.batch_size, parts, micro_steps, equal=equal)
        return found

    def _run_state(self) -> TrainState:
        if not self._built:
            raise InputError("A model must be built before a run resumes. Received: none. Call trainer.build(data).")
        return TrainState(self.model, self.strategy, self._kept, self.callback_memory)

    def _sync(self, site: Site, every: int, what: str) -> Inspection:
        if what == "gradients":
            return GradientNorms(site, every)
        return ReplicaDivergence(site, every, lambda: self._run_state().alike())

    def _values(self, batch_schedule: BatchSchedule, order: list[str]) -> dict[str, Any]:
        return {
            "begun_at": batch_schedule.begun_at,
            "course": batch_schedule.to_json(),
            "progress": self.progress.to_json(),
            "compression": dict(self.steps.overrides),
            "replicas": self.strategy.replicas,
            "strategy": self.strategy.name,
            "order": order,
        }

    def evaluate(self, data: Any, *, batch_size: int) -> dict[str, float]:
        """Returns the loss and the metrics over a whole data set; the same for any number of replicas.

        Args:
          data: data to evaluate on; see `fit`.
          batch_size: examples per batch, over all replicas; does not affect the result.
        """
        examples = as_examples(data)
        self.build(examples)
        self.average_statistics()
        self.drain()  # discards what earlier calls added to metrics of layers
        return self._evaluator.evaluate(examples, batch_size)

    def build(self, data: Examples) -> None:
        """Creates all variables and makes them equal on all replicas; does nothing if already built."""
        if self._built:
            return
        batched = tf.nest.map_structure(lambda s: tf.TensorSpec([None, *s.shape], s.dtype), data.element_spec)
        with self.strategy.scope():
            with must_fit(data.element_spec):
                keras_internals.build(self.model, batched)
            check_trains(self.model)
            check_alike(self.strategy.group, self.model)
            self.strategy.synchronize([*self.model.variables, *self.model.optimizer.variables])
        self._trained = [id(variable) for variable in self.model.trainable_variables]
        metrics.check_names(self.model)
        metrics.check_sums(keras_internals.metrics_of(self.model))
        check_metric_names(keras_internals.names_of_compiled_metrics(self.model))
        check_metric_names(keras_internals.names_of_layers_metrics(self.model))
        self.metrics = metrics.ModelMetrics(self.model)
        self.drain = metrics.make_drain(self.metrics, self.strategy)
        self.average_statistics = metrics.make_average_statistics(self.model, self.strategy)
        self._evaluator = Evaluator(self.model, self.strategy, self._settings.seed, self.metrics, self.drain)
        check_micro_steps(self.model, self._settings.micro_steps)
        self.steps = Steps(self.model, self.strategy, self._settings, self._compression, self._kept, self.metrics)
        self._built = True

    @property
    def loss_scale(self) -> float | None:
        """The current factor of the loss; None without loss scaling."""
        if self._settings.loss_scale is None:
            return None
        return float(self._kept.array("loss_scale/scale").values)

    @property
    def state(self) -> dict[str, StateArray]:
        """State of the step besides weights and optimizer state, by name: error feedback, loss scale and so on."""
        return self._kept.arrays()

    def save(self, path: AnyPath) -> None:
        """Saves the model in Keras's format on the chief; call it on every process. The path never has half a model.

        Keras alone can load the file, with tfdist imported if the model has layers of tfdist. Synchronized BatchNorm is
        saved as ordinary BatchNorm, its equal in inference. The optimizer is saved too, unless a layer was replaced in
        this way or Keras does not know it: one of tfdist, or one whose learning rate has a warmup.
        """
        self.average_statistics()
        with self.strategy.whole([*self.model.variables, *self.model.optimizer.variables]):
            if self.strategy.is_chief:
                save_model(self.model, path)
