"""Exchanges of weight fragments at different steps, with results that may be used some steps later."""

import concurrent.futures
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.config.sync import LocalSGD
from tfdist.errors import InputError
from tfdist.synchronization.periodic import PeriodicSynchronizer
from tfdist.synchronization.weight_averaging import Exchange, ExchangeResult

_T = TypeVar("_T")


def call_in_background(function: Callable[[], _T], started: threading.Event) -> concurrent.futures.Future[_T]:
    """Calls a function in a thread; returns when the function has set `started` and may run concurrently with other calls.

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


def split_fragments(weights: Sequence[keras.Variable], count: int) -> list[list[keras.Variable]]:
    """Splits at least `count` variables into fragments of about equal size; variables keep their order in a fragment.

    Variables are assigned to the smallest fragment so far, the largest variable first. Layers of equal size are therefore
    distributed alternately, which trains better than fragments of consecutive layers (arXiv:2501.18512).
    """
    sizes = [keras_internals.bytes_of(variable) for variable in weights]
    members: list[list[int]] = [[] for _ in range(count)]
    fragment_bytes = [0] * count
    for i in sorted(range(len(weights)), key=lambda i: -sizes[i]):
        smallest = min(range(count), key=lambda p: (fragment_bytes[p], len(members[p])))
        members[smallest].append(i)
        fragment_bytes[smallest] += sizes[i]
    return [[weights[i] for i in sorted(indices)] for indices in members]


_EXIT_SECONDS = 5.0  # time for a pending exchange to complete after an error


@dataclasses.dataclass
class _PendingExchange:
    """A fragment whose exchange has begun and whose result has not been used yet."""

    fragment: int  # index of the fragment
    step: int  # step at which it was sent
    # The exchange in the background; None after the global weights were updated.
    call: concurrent.futures.Future[ExchangeResult] | None = None
    divergence: float = 0.0  # see `ExchangeResult`; set when the call has ended


class StreamingSynchronizer(PeriodicSynchronizer):
    """Exchanges each fragment every `period` steps, at a different offset from the first local step.

    The result of an exchange is used some steps later, before the next fragment is sent: at most one fragment is in flight.
    See `LocalSGD.offsets` and `LocalSGD.delays`.
    """

    _sync: LocalSGD

    def __init__(self, sync: LocalSGD, *args: Any):
        """Creates the global weights; raises `InputError` if there are more fragments than variables."""
        super().__init__(sync, *args)
        self._offsets = sync.offsets(
            [sum(map(keras_internals.bytes_of, exchange.weights)) for exchange in self._exchanges]
        )
        self._delays = sync.delays(self._offsets)
        self._started = threading.Event()
        self._send_steps: list[int] = []  # step at which each fragment was last sent; empty before local training
        self._pending_exchange: _PendingExchange | None = None

    def _make_exchanges(self, model: keras.Model) -> Sequence[Exchange]:
        sync, weights = self._sync, model.trainable_variables
        if sync.fragment_count > len(weights):
            raise InputError(
                f"Each fragment must have a variable of the model. Received: {sync.fragment_count} fragments of "
                f"{len(weights)} variables. Use at most {len(weights)} fragments."
            )
        options = self._strategy, self._create_reducer, self._store, sync.outer
        return [
            Exchange(fragment, *options, name=f"exchange/{index}", mixing=sync.effective_mixing)
            for index, fragment in enumerate(split_fragments(weights, sync.fragment_count))
        ]

    def next_step(self, step: int) -> int | None:
        if step < self._sync.first_local_step:
            return self._sync.first_local_step
        send_steps = [self._next_send_step(p, step) for p in range(len(self._delays))]
        use_steps = [self._next_send_step(p, step - delay) + delay for p, delay in enumerate(self._delays)]
        return min(*send_steps, *use_steps)

    def _next_send_step(self, fragment: int, step: int) -> int:
        """Returns the next step after `step` at which a fragment is sent."""
        period, offset = self._sync.period, self._offsets[fragment]
        first_step = self._sync.first_local_step + (offset or period)
        return first_step if step < first_step else first_step + ((step - first_step) // period + 1) * period

    def begin(self, step: int, batch_size: int) -> None:
        self._batch_size = batch_size
        if self.is_local_step(step) and not self._send_steps:
            self._send_steps = [step] * self._sync.fragment_count
            self._take_over_weights()

    def run_exchanges(self, step: int) -> Mapping[str, float]:
        """See base class. Returns `replica_divergence` when the result of an exchange is used."""
        if not self.is_local_step(step) or not self._send_steps:
            self.begin(step, self._batch_size)
            return {}
        fields = self._use_if_due(step)
        for index in range(len(self._delays)):
            if self._next_send_step(index, step - 1) == step:
                self._send(index, step)
                fields |= self._use_if_due(step)
        return fields

    def wait_for_exchange(self) -> None:
        """See base class. Also updates the global weights."""
        if self._pending_exchange and self._pending_exchange.call:
            self._pending_exchange.divergence = self._divergence(self._pending_exchange.call.result())
            self._pending_exchange.call = None

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            if self._pending_exchange and self._pending_exchange.call:
                concurrent.futures.wait([self._pending_exchange.call], _EXIT_SECONDS)
            raise
        self.wait_for_exchange()

    @contextlib.contextmanager
    def with_global_weights(self, step: int) -> Iterator[None]:
        self.wait_for_exchange()
        with contextlib.ExitStack() as stack:
            for mean in self._means if self._send_steps else []:
                stack.enter_context(mean())
            yield

    def to_json(self) -> dict[str, Any]:
        self.wait_for_exchange()
        pending = self._pending_exchange
        # A string, because JSON has no NaN.
        entry = [pending.fragment, pending.step, repr(pending.divergence)] if pending else []
        return {"since": list(self._send_steps), "sent": entry}

    def restore(self, saved: Mapping[str, Any], step: int) -> None:
        super().restore(saved, step)
        self._send_steps = list(saved.get("since", []))
        self._pending_exchange = None
        if saved.get("sent"):
            fragment, send_step, divergence = saved["sent"]
            self._pending_exchange = _PendingExchange(fragment, send_step, divergence=float(divergence))

    def _can_resume(self, saved: Mapping[str, Any]) -> bool:
        return saved.get("last_exchange") is None and len(saved.get("since", [])) in (0, self._sync.fragment_count)

    def _send(self, index: int, step: int) -> None:
        fragment = self._exchanges[index]
        summands = self._on_replicas(fragment.prepare, self._expected_rows(step - self._send_steps[index]))
        exchange = self._compiled_exchange(fragment, fragment.exchange, summands, prologue=self._signal)
        if self._sync.overlap:
            call = call_in_background(lambda: exchange(summands), self._started)
            self._pending_exchange = _PendingExchange(index, step, call)
        else:
            self._pending_exchange = _PendingExchange(index, step, divergence=self._divergence(exchange(summands)))
        self._send_steps[index] = step

    def _use_if_due(self, step: int) -> dict[str, float]:
        """If the result of the pending exchange is due at this step, waits for it and uses it."""
        pending = self._pending_exchange
        if pending is None or step < pending.step + self._delays[pending.fragment]:
            return {}
        self.wait_for_exchange()
        self._pending_exchange = None
        self._on_replicas(self._exchanges[pending.fragment].use_result)
        return {"replica_divergence": pending.divergence}

    def _signal(self) -> None:
        """Adds an operation that signals the start of an exchange to the main thread.

        TensorFlow numbers the collectives of a call when the call begins, and matches them by number between processes. The
        main thread must not begin another call at the same time, because processes might number the two differently.
        """

        def signal() -> np.bool_:
            self._started.set()
            return np.bool_(True)

        tf.numpy_function(signal, [], tf.bool)
