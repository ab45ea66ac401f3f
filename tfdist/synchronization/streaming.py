"""Exchanges of weight fragments at different steps, with results that may be used some steps later."""

import concurrent.futures
import contextlib
import dataclasses
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import Recording
from tfdist.collectives.forwarding import SequentialCollectives
from tfdist.collectives.trace_check import agree_on_plan
from tfdist.config.sync import LocalSGD
from tfdist.distribution.strategy import State, Strategy
from tfdist.errors import InputError
from tfdist.gradients import Reducer
from tfdist.step.layer_state import assign
from tfdist.step.local_step import ROWS
from tfdist.step.reduction import Reduction
from tfdist.step.state_store import StateStore
from tfdist.step.validation import inner_optimizer
from tfdist.synchronization.exchange import (
    ExchangeResult,
    GlobalWeights,
    apply_constraints,
    message_of,
    read_variables,
    replica_mean,
    tensor_specs,
    update_global_weights,
    zeros_like,
)
from tfdist.synchronization.interface import WeightSynchronizer
from tfdist.synchronization.periodic import check_resumable

_T = TypeVar("_T")


def call_in_background(function: Callable[[], _T], started: threading.Event) -> concurrent.futures.Future[_T]:
    """Calls a function in a thread; returns when it has set `started`, because it may run concurrently with other calls.

    The thread is a daemon, unlike those of `concurrent.futures`: a call that waits for a lost process must not prevent this
    process from exiting.
    """
    future: concurrent.futures.Future[_T] = concurrent.futures.Future()

    def run() -> None:
        # `started` is set before the future: a caller that waits for the result may then start the next call, which shares it.
        try:
            result = function()
        except BaseException as error:
            started.set()
            future.set_exception(error)
        else:
            started.set()
            future.set_result(result)

    started.clear()
    threading.Thread(target=run, name="tfdist-exchange", daemon=True).start()
    started.wait()
    return future


# Each fragment of the weights is exchanged separately, in three parts: the message, the exchange, and the use of its result.
# With the notation of `exchange`, for the weights of one fragment, sent at step t and used at step u = t + delay:
#
#     d = sum over r of n_r (x - w_r(t)) / sum over r of n_r,        x' = outer(x, d)
#     w_r(u) = mixing w_r(u) + (1 - mixing) x'            Streaming DiLoCo (Douillard et al., arXiv:2501.18512)
#     w_r(u) = x' + w_r(u) - w_r(t)                       local SGD with a delay (CoCoD-SGD, Shen et al., arXiv:1906.12043)
#
# The exchange neither reads nor changes variables of the steps, so both may run concurrently.


class Fragment:
    """The replica functions of one fragment.

    Attributes:
      weights: trainable variables of the fragment.
      global_weights: the global weights.
      own_variables: the weights that each replica sent, if replicas keep their local progress; else empty.
      recording: the calls of the exchange's latest trace.
    """

    def __init__(
        self,
        number: int,
        weights: Sequence[keras.Variable],
        strategy: Strategy,
        make_reducer: Callable[[Sequence[tf.TensorSpec]], Reducer],
        store: StateStore,
        outer: str,
        mixing: float | None,
    ):
        """Creates the variables; `make_reducer` returns a reducer for tensors, `mixing` is `LocalSGD.effective_mixing`."""
        self.weights = list(weights)
        self.global_weights = GlobalWeights(weights, strategy, outer)
        self.recording: Recording | None = None
        self._strategy, self._mixing = strategy, mixing
        self._name = f"exchange/{number}"
        specs = tensor_specs(weights)
        self._reduction = Reduction(make_reducer(specs), specs, store, f"{self._name}/")
        # Steps count all rows; the fragments are sent at different steps.
        sent_rows = State(f"{self._name}/rows_sent", (), tf.float64, per_replica=True)
        self._all_rows, self._rows_sent = store.variables([ROWS, sent_rows])
        self.own_variables: list[keras.Variable] = []
        if mixing is None:
            with strategy.scope():
                self.own_variables = [zeros_like(variable, "sent") for variable in weights]

    def rows(self) -> tf.Tensor:
        """Returns the number of rows on which the replica has trained since the fragment was sent."""
        return tf.convert_to_tensor(self._all_rows) - tf.convert_to_tensor(self._rows_sent)

    def take_weights(self) -> None:
        """Assigns the weights, which are equal on all replicas, to the global weights."""
        self.global_weights.take_weights(self.weights)
        self._rows_sent.assign(tf.convert_to_tensor(self._all_rows))

    def prepare(self, expected_rows: tf.Tensor) -> list[tf.Tensor]:
        """Returns the message of the replica.

        Args:
          expected_rows: scalar of dtype floatx; rows since the last exchange of a replica with an equal share.
        """
        rows = tf.cast(self.rows(), expected_rows.dtype) / expected_rows
        weights = read_variables(self.weights)
        message = message_of(self.global_weights.values(), weights, rows)
        with self._strategy.own_copies(self.own_variables):
            assign(self.own_variables, weights if self.own_variables else [])
        self._rows_sent.assign(tf.convert_to_tensor(self._all_rows))
        return message

    def exchange(self, message: Sequence[tf.Tensor]) -> ExchangeResult:
        """Sums the messages of all replicas and updates the global weights."""
        self.recording = Recording(SequentialCollectives(self._strategy.step_collectives))
        reduction = self._reduction.reduce(message, self.recording, name=self._name)
        _, result = update_global_weights(self.global_weights, reduction.totals)
        self._reduction.assign(reduction.state)
        return result

    def use_result(self) -> None:
        """Updates the replica's weights with the result of the exchange."""
        global_weights = self.global_weights.values()
        local_weights = read_variables(self.weights)
        if self._mixing is None:
            sent_weights = read_variables(self.own_variables)
            weights = apply_constraints(
                self.weights, [x + (w - s) for x, w, s in zip(global_weights, local_weights, sent_weights, strict=True)]
            )
        elif self._mixing:
            mixed_weights = [
                self._mixing * w + (1 - self._mixing) * x for x, w in zip(global_weights, local_weights, strict=True)
            ]
            weights = apply_constraints(self.weights, mixed_weights)
        else:
            weights = global_weights
        with self._strategy.own_copies(self.weights):
            assign(self.weights, weights)


def split_fragments(weights: Sequence[keras.Variable], count: int) -> list[list[keras.Variable]]:
    """Splits at least `count` variables into fragments of about equal size; variables keep their order in a fragment.

    Variables are assigned to the smallest fragment so far, the largest variable first. Layers of equal size are therefore
    distributed in turn, which trains better than fragments of consecutive layers (arXiv:2501.18512).
    """
    sizes = [bytes_of([variable]) for variable in weights]
    members: list[list[int]] = [[] for _ in range(count)]
    fragment_bytes = [0] * count
    for i in sorted(range(len(weights)), key=lambda i: -sizes[i]):
        smallest = min(range(count), key=lambda p: (fragment_bytes[p], len(members[p])))
        members[smallest].append(i)
        fragment_bytes[smallest] += sizes[i]
    return [[weights[i] for i in sorted(indices)] for indices in members]


def bytes_of(weights: Sequence[keras.Variable]) -> int:
    """Returns the size of all weights in bytes."""
    return sum(math.prod(variable.shape) * tf.as_dtype(variable.dtype).size for variable in weights)


_ENDING_SECONDS = 5.0  # time for a pending exchange to complete after an error


@dataclasses.dataclass
class _PendingExchange:
    """A fragment whose exchange has begun and whose result has not been used yet.

    Attributes:
      fragment: index of the fragment.
      step: step at which it was sent.
      call: the exchange in the background; None after the global weights were updated.
      divergence: see `ExchangeResult`; set when the call has ended.
    """

    fragment: int
    step: int
    call: concurrent.futures.Future[ExchangeResult] | None = None
    divergence: float = 0.0


class StreamingSynchronizer(WeightSynchronizer):
    """Exchanges each fragment every `period` steps, at a different offset from the first local step.

    The result of an exchange is used some steps later, before the next fragment is sent: at most one fragment is in flight.
    See `LocalSGD.offsets` and `LocalSGD.delays`.
    """

    has_local_weights = True

    def __init__(
        self,
        sync: LocalSGD,
        model: keras.Model,
        strategy: Strategy,
        make_reducer: Callable[[Sequence[tf.TensorSpec]], Reducer],
        store: StateStore,
    ):
        """Creates the global weights.

        Raises:
          InputError: there are more fragments than variables.
        """
        self._sync, self._strategy = sync, strategy
        weights = list(model.trainable_variables)
        if sync.fragment_count > len(weights):
            raise InputError(
                f"Each fragment must have a variable of the model. Received: {sync.fragment_count} fragments of "
                f"{len(weights)} variables. Use at most {len(weights)}."
            )
        self._fragments = [
            Fragment(p, fragment_weights, strategy, make_reducer, store, sync.outer, sync.effective_mixing)
            for p, fragment_weights in enumerate(split_fragments(weights, sync.fragment_count))
        ]
        self._offsets = sync.offsets([bytes_of(fragment.weights) for fragment in self._fragments])
        self._delays = sync.delays(self._offsets)
        self.variables = [v for fragment in self._fragments for v in fragment.global_weights.variables]
        self.own_variables = [v for fragment in self._fragments for v in fragment.own_variables]
        averages = {id(v): a for v, a in keras_internals.weight_averages(inner_optimizer(model.optimizer))}
        self._means = [
            replica_mean([*f.weights, *(averages[id(v)] for v in f.weights if id(v) in averages)], strategy, f.rows)
            for f in self._fragments
        ]
        self._compiled_functions: dict[Callable[..., Any], Any] = {}
        self._started = threading.Event()
        self._batch_size = 0
        self._send_steps: list[int] = []  # step at which each fragment was last sent; empty before local training
        self._pending_exchange: _PendingExchange | None = None

    def is_local_step(self, step: int) -> bool:
        return step >= self._sync.first_local_step

    def next(self, step: int) -> int | None:
        if step < self._sync.first_local_step:
            return self._sync.first_local_step
        send_steps = [self._next_send_step(p, step) for p in self._fragment_indices]
        use_steps = [self._next_send_step(p, step - delay) + delay for p, delay in enumerate(self._delays)]
        return min(*send_steps, *use_steps)

    @property
    def _fragment_indices(self) -> range:
        return range(self._sync.fragment_count)

    def _next_send_step(self, fragment: int, step: int) -> int:
        """Returns the next step after `step` at which a fragment is sent."""
        period, offset = self._sync.period, self._offsets[fragment]
        first_step = self._sync.first_local_step + (offset or period)
        return first_step if step < first_step else first_step + ((step - first_step) // period + 1) * period

    def begin(self, step: int, batch_size: int) -> None:
        self._batch_size = batch_size
        if self.is_local_step(step) and not self._send_steps:
            self._send_steps = [step] * self._sync.fragment_count
            for fragment in self._fragments:
                self._on_replicas(fragment.take_weights)

    def run_exchanges(self, step: int) -> Mapping[str, float]:
        """See base class. Returns `replica_divergence` when the result of an exchange is used."""
        if not self.is_local_step(step) or not self._send_steps:
            self.begin(step, self._batch_size)
            return {}
        fields: dict[str, float] = {}
        fields |= self._use_if_due(step)
        for number in self._fragment_indices:
            if self._next_send_step(number, step - 1) == step:
                self._send(number, step)
                fields |= self._use_if_due(step)
        return fields

    def settle(self) -> None:
        """See base class. Also updates the global weights."""
        if self._pending_exchange and self._pending_exchange.call:
            self._pending_exchange.divergence = self._divergence(self._pending_exchange.call.result())
            self._pending_exchange.call = None

    def _divergence(self, result: ExchangeResult) -> float:
        return float(self._strategy.local(result.divergence)[0])

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            if self._pending_exchange and self._pending_exchange.call:
                concurrent.futures.wait([self._pending_exchange.call], _ENDING_SECONDS)
            raise
        self.settle()

    @contextlib.contextmanager
    def with_global_weights(self, step: int) -> Iterator[None]:
        self.settle()
        with contextlib.ExitStack() as stack:
            for mean in self._means if self._send_steps else []:
                stack.enter_context(mean())
            yield

    @property
    def payload_per_step(self) -> float:
        """See base class. This is the payload of one exchange of all fragments, divided by the period."""
        recordings = [fragment.recording for fragment in self._fragments if fragment.recording]
        if len(recordings) < len(self._fragments):
            return 0
        return sum(recording.payload_bytes for recording in recordings) / self._sync.period

    def to_json(self) -> dict[str, Any]:
        self.settle()
        pending = self._pending_exchange
        entry = (
            [pending.fragment, pending.step, repr(pending.divergence)] if pending else []
        )  # a string, because JSON has no NaN
        return {"since": list(self._send_steps), "sent": entry}

    def restore(self, saved: Mapping[str, Any], step: int) -> None:
        """See base class.

        Raises:
          InputError: the run used another kind of exchange.
        """
        since = list(saved.get("since", []))
        is_compatible = saved.get("last_exchange") is None and len(since) in (0, self._sync.fragment_count)
        check_resumable(self._sync, saved, step, is_compatible=is_compatible)
        self._send_steps = since
        self._pending_exchange = None
        if saved.get("sent"):
            fragment, send_step, divergence = saved["sent"]
            self._pending_exchange = _PendingExchange(fragment, send_step, divergence=float(divergence))

    def _send(self, number: int, step: int) -> None:
        """Sends a fragment. Processes compare their calls the first time."""
        fragment = self._fragments[number]
        share = self._batch_size * (step - self._send_steps[number]) / self._strategy.replicas
        message = self._on_replicas(fragment.prepare, tf.constant(share, keras.config.floatx()))
        is_first = fragment.recording is None
        exchange = self._compiled_for(fragment.exchange, message, prologue=self._signal)
        if is_first:
            assert fragment.recording is not None
            agree_on_plan(self._strategy.peers, fragment.recording.calls)
        if self._sync.overlap:
            call = call_in_background(lambda: exchange(message), self._started)
            self._pending_exchange = _PendingExchange(number, step, call)
        else:
            self._pending_exchange = _PendingExchange(number, step, divergence=self._divergence(exchange(message)))
        self._send_steps[number] = step

    def _use_if_due(self, step: int) -> dict[str, float]:
        """If the result of the pending exchange is due at this step, waits for it and uses it."""
        if (
            self._pending_exchange is None
            or step < self._pending_exchange.step + self._delays[self._pending_exchange.fragment]
        ):
            return {}
        self.settle()
        exchange, self._pending_exchange = self._pending_exchange, None
        self._on_replicas(self._fragments[exchange.fragment].use_result)
        return {"replica_divergence": exchange.divergence}

    def _on_replicas(self, function: Callable[..., Any], *args: Any) -> Any:
        return self._compiled_for(function, *args)(*args)

    def _compiled_for(
        self, function: Callable[..., Any], *args: Any, prologue: Callable[[], object] = lambda: None
    ) -> Any:
        """Returns a replica function compiled for arguments of these shapes. Compiles it once, in the main thread.

        `prologue` is called at the start of the trace, outside of replicas.
        """

        def run(*run_args: Any) -> Any:
            prologue()
            return self._strategy.run(function, *run_args)

        if function not in self._compiled_functions:
            self._compiled_functions[function] = tf.function(run, autograph=False).get_concrete_function(*args)
        return self._compiled_functions[function]

    def _signal(self) -> None:
        """Adds an operation that signals the start of an exchange to the main thread.

        TensorFlow numbers the collectives of a call when it begins, and matches numbers between processes. The main thread
        must not begin a call at the same time, because processes might number the two calls differently.
        """

        def signal() -> np.bool_:
            self._started.set()
            return np.bool_(True)

        tf.numpy_function(signal, [], tf.bool)
