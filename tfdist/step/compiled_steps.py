"""The steps of one trainer: the current reducer, the loop compiled for it, and probe steps that do not train."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import Collectives
from tfdist.collectives.interface import tensor_bytes
from tfdist.config.all_reduce import AlgorithmTable, Band
from tfdist.config.pipeline import check_without_flush
from tfdist.distribution.strategy import State, Strategy
from tfdist.gradients import Reducer, Sum
from tfdist.gradients.compression import EXACT, choose_methods
from tfdist.pipelining.execution import ActionClock
from tfdist.pipelining.staged_model import pipeline_without_flush
from tfdist.row_semantics.explanation import Communication
from tfdist.step.compiled_loop import Loop, LoopResult, MakeLoop, compile_loop
from tfdist.step.compression import Compression
from tfdist.step.delayed_step import DelayedStep, compile_delayed_loop, compile_timed_steps
from tfdist.step.gradient_source import GradientSource
from tfdist.step.local_step import compile_local_loop
from tfdist.step.metrics import ModelMetrics
from tfdist.step.pipelined_step import PipelinedGradients
from tfdist.step.settings import Settings, cost_of, named_specs, sparse_gradient_names
from tfdist.step.state_store import StateStore
from tfdist.step.step import Step
from tfdist.step.validation import inner_optimizer

_log = logging.getLogger(__name__)


class Steps:
    """Creates the steps of a built model. Loops are compiled once for each set of options and share the state."""

    def __init__(
        self,
        model: keras.Model,
        strategy: Strategy,
        settings: Settings,
        compression: Compression,
        store: StateStore,
        metrics: ModelMetrics,
    ):
        self.model, self.strategy = model, strategy
        self.specs = named_specs(model.trainable_variables, "loss")
        self.compression = compression
        self.overrides: dict[str, str] = {}
        self.end = 0  # step at which the current run ends, beyond which no batch is read
        # A custom reducer may not support gradients as rows.
        takes_rows = not (isinstance(compression.methods, Reducer) or strategy.sums_gradients)
        sparse = sparse_gradient_names(model) if takes_rows else frozenset()
        self._settings, self._store, self._metrics = replace(settings, sparse=sparse), store, metrics
        self._loops: dict[Any, tuple[Step, Loop]] = {}
        self._current: Step | None = None

    def loop(
        self, batch_size: int | None, make: MakeLoop = compile_loop, rate_factor: float = 1.0, is_local: bool = False
    ) -> Loop:
        """Returns the loop for a batch size (see `Settings`) and the current compression methods.

        `make` is `compile_loop`, or `make_host_loop` for batches that are already in memory; it is ignored if each
        replica updates its own weights (`is_local`). The optimizer's learning rate is multiplied by `rate_factor`.
        """
        key = (batch_size, make, rate_factor, is_local, tuple(sorted(self.overrides.items())))
        if key not in self._loops:
            with self.strategy.raise_on_all_members("loop"):
                step, loop = self._create_loop(batch_size, make, is_local)
            self._loops[key] = (step, _learning_rate_scope(inner_optimizer(self.model.optimizer), rate_factor)(loop))
        self._current, loop = self._loops[key]
        return loop

    def custom_loop(self, key: Any, create: Callable[[Settings, StateStore, ModelMetrics], tuple[Step, Loop]]) -> Loop:
        """Returns a loop with custom steps, created once for each key."""
        if key not in self._loops:
            self._loops[key] = create(replace(self._settings, sparse=frozenset()), self._store, self._metrics)
        self._current, loop = self._loops[key]
        return loop

    def loop_at_rate(self, batch_size: int, rate: Callable[[keras.Variable], tf.Tensor]) -> Loop:
        """Returns a loop that updates the same variables with another learning rate. The loop is not cached.

        `rate` maps the optimizer's number of updates to the learning rate.
        """
        if pipeline := pipeline_without_flush(self.strategy):
            check_without_flush(pipeline.schedule.name, find="learning_rate")
        loop, optimizer = compile_loop(self._step(batch_size), self.strategy), inner_optimizer(self.model.optimizer)

        def run(*arguments: Any) -> LoopResult:
            with keras_internals.replace_learning_rate(optimizer, rate):
                return loop(*arguments)

        return run

    def _create_loop(self, batch_size: int | None, make: MakeLoop, is_local: bool) -> tuple[Step, Loop]:
        if is_local:
            step = Step(self._source(batch_size, takes_rows=False, is_local=True), Sum(), self._store)
            return step, compile_local_loop(step, self._store, self.strategy)
        step = self._step(batch_size)
        if pipeline := pipeline_without_flush(self.strategy):
            return step, compile_delayed_loop(DelayedStep(step, self._store), pipeline, lambda: self.end)
        return step, make(step, self.strategy)

    def _step(self, batch_size: int | None, **options: Any) -> Step:
        return Step(self._source(batch_size, **options), self.reducer(), self._store)

    def _source(
        self, batch_size: int | None, *collectives: Collectives | None, takes_rows: bool = True, **options: Any
    ) -> Any:
        """Returns the gradient source; `takes_rows` tells whether the reducer accepts gradients as rows."""
        source_class = GradientSource if self.strategy.trains_whole_model else PipelinedGradients
        sparse = self._settings.sparse if takes_rows else frozenset()
        settings = replace(self._settings, batch_size=batch_size, sparse=sparse)
        return source_class(self.model, self.strategy, self._store, settings, self._metrics, *collectives, **options)

    @property
    def sums_gradients(self) -> bool:
        """Whether gradients are summed over several replicas in every step."""
        strategy = self.strategy
        return strategy.replicas > 1 and not (self._settings.sync.exchanges_weights or strategy.remote)

    @property
    def has_loop(self) -> bool:
        """Whether a loop was created."""
        return bool(self._loops)

    @property
    def sends_rows(self) -> bool:
        """Whether the traced forward pass sends rows, whose number may change from step to step."""
        return self._current is not None and self._current.sends_rows

    def communication(self, spec: Any) -> Communication:
        """Returns the communication of a partitioned step; see `GradientSource.communication`."""
        return self._source(None, takes_rows=False).communication(spec)

    def choose_methods(self, methods: Mapping[str, str], candidates: Sequence[str]) -> None:
        """Switches gradients, by name, to other methods; every process must make this call at the same step.

        The choice is part of the state: `compression/choice` contains, for each gradient, the index of its method among
        the candidates, or -1.
        """
        self.overrides |= methods
        indices = [candidates.index(methods[s.name]) if s.name in methods else -1 for s in self.specs]
        variable = self._choice_variable()
        self.strategy.run(lambda: variable.assign(indices))

    def restore_methods(self, overrides: Mapping[str, str]) -> None:
        """Restores the methods of a resumed run. User code that only the checkpoint names is not run."""
        includes_code = self.compression.includes_code
        self.overrides = {name: methods for name, methods in overrides.items() if includes_code(methods)}
        unknown = sorted({methods for name, methods in overrides.items() if name not in self.overrides})
        if unknown and self.strategy.is_chief:
            text = "Ignoring %s, which the previous run chose, because --compression no longer contains it."
            _log.warning(text, ", ".join(unknown))
        if self.overrides and self.compression.choice:
            self._choice_variable()

    @property
    def all_reduce_table(self) -> list[list[Any]]:
        """The measured table of algorithms as JSON; empty if there is none. Part of the state of a run."""
        tuned = self.strategy.tuned_collectives
        return [list(band) for band in tuned.table.bands] if tuned and tuned.is_measured else []

    @property
    def needs_all_reduce_table(self) -> bool:
        """Whether a table of algorithms must be measured before the next step."""
        tuned = self.strategy.tuned_collectives
        return bool(tuned and tuned.is_measured and not tuned.table.bands)

    def use_all_reduce_table(self, table: AlgorithmTable) -> None:
        """Switches to a measured table of algorithms; every process must make this call at the same step."""
        assert self.strategy.tuned_collectives
        self.strategy.tuned_collectives = self.strategy.tuned_collectives.with_table(table)
        self._loops.clear()  # compiled with other algorithms

    def resume_all_reduce_table(self, bands: Sequence[Sequence[Any]], replicas: int) -> None:
        """Restores the table of a resumed run, unless it was measured with a different number of replicas."""
        tuned = self.strategy.tuned_collectives
        if bands and replicas == self.strategy.replicas and tuned and tuned.is_measured:
            self.use_all_reduce_table(AlgorithmTable(tuple(Band(*band) for band in bands)))

    def _choice_variable(self) -> tf.Variable:
        states = [State("compression/choice", (len(self.specs),), tf.int32, False, initial=-1)]
        return self._store.variables(states)[0]

    def use_exact_sums(self, names: Sequence[str]) -> None:
        """Switches gradients to exact sums. The first sum includes the error that error feedback has stored."""
        state_names = {state.name for state in self.reducer().state(self.specs)}
        self.overrides |= {name: f"none(feedback={f'{name}/error' in state_names})" for name in names}

    def reducer(self) -> Reducer:
        """Returns the current reducer."""
        if self.strategy.sums_gradients:  # by its engine; a bucket would gather their shards
            return Sum()
        return self.compression.reducer(self.specs, self.overrides, self._settings.sparse)

    def compressible(self) -> list[tf.TensorSpec]:
        """Returns the specs of the gradients that are large enough to be compressed."""
        min_bytes = self.compression.min_bytes
        return [s for s in self.specs if s.shape.rank and tensor_bytes(s) >= min_bytes]

    def compressed_names(self) -> list[str]:
        """Returns the names of the gradients that are currently not summed exactly."""
        if isinstance(self.compression.methods, Reducer):
            return [spec.name for spec in self.specs[:-1]]
        methods = choose_methods(self.specs, self.compression.rules, self.overrides, self.compression.min_bytes)
        return [s.name for s, method in zip(self.specs, methods, strict=True) if not method.startswith(EXACT)]

    @property
    def has_small_gradients(self) -> bool:
        """Whether every gradient is too small to be compressed."""
        return all(tensor_bytes(s) < self.compression.min_bytes for s in self.specs)

    @property
    def idle_compression(self) -> str:
        """A warning if a method was chosen and every gradient is too small for it; otherwise ""."""
        methods = self.compression.methods
        if not isinstance(methods, str) or methods in ("none", "auto") or not self.has_small_gradients:
            return ""
        return (
            f"--compression={methods} has no effect, because every gradient is smaller than --compression_min_bytes="
            f"{self.compression.min_bytes} and is summed exactly. Lower --compression_min_bytes, or remove --compression."
        )

    def probe(
        self,
        batch_size: int,
        reducer: Reducer | None = None,
        collectives: Collectives | None = None,
        read: Callable[[], Any] = tuple,
        **options: Any,
    ) -> Callable[[Any, tf.Tensor], Any]:
        """Compiles a step that computes and reduces gradients but leaves the training state unchanged.

        Returns a compiled function (batch, step number) -> per-replica (finite, gradient norm, result of `read`). `reducer` and
        `collectives` replace those of training. `read` returns additional results, such as observations of the reducer;
        it is called while the step is traced. `options` are further arguments of the gradient source, such as a `clock`.
        """
        source = self._source(batch_size, collectives, takes_rows=reducer is None, **options)
        step = Step(source, reducer or self.reducer(), self._store)

        def replica_function(batch: Any, number: tf.Tensor) -> Any:
            result = step.compute(batch, number, tf.constant(True))
            step.undo(result)
            return result.finite, result.norm, read()

        return tf.function(lambda batch, number: self.strategy.run(replica_function, batch, number), autograph=False)

    def timed_steps(self, batch_size: int, clock: ActionClock, count: int) -> Callable[[Any, tf.Tensor], tf.Tensor]:
        """Compiles steps of a pipeline without a flush that update nothing; see `compile_timed_steps`."""
        pipeline = pipeline_without_flush(self.strategy)
        assert pipeline
        step = DelayedStep(self._step(batch_size, clock=clock), self._store)
        return compile_timed_steps(step, pipeline, clock, count)

    def cost(self, exchanged_bytes: float) -> dict[str, float]:
        """Returns `payload_bytes`, `message_bytes` (a part of it) and `compression_ratio` of a step, as fields of a record.

        `exchanged_bytes` is the number of bytes per step of exchanges of weights; 0 if every step sums gradients. The
        result is empty before the first step, and if the engine itself sums the gradients.
        """
        exact_bytes = sum(map(tensor_bytes, self.specs))
        if exchanged_bytes:
            return cost_of(exchanged_bytes, exact_bytes - tensor_bytes(self.specs[-1]))
        step = self._current
        if step is None or step.gradient_calls is None or self.strategy.sums_gradients:
            return {}  # `tfdist layout` predicts the messages of an engine
        messages = step.source.messages
        message_bytes = messages.payload_bytes if messages else 0
        return cost_of(step.gradient_calls.payload_bytes, exact_bytes, message_bytes)


@contextlib.contextmanager
def _learning_rate_scope(optimizer: keras.Optimizer, rate: float) -> Iterator[None]:
    """Context in which updates are traced with a scaled learning rate and with the momentum of its schedule."""
    with keras_internals.scale_learning_rate(optimizer, rate), keras_internals.scheduled_momentum(optimizer):
        yield
