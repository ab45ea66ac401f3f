"""Measures the error of lossy compression against the exact sum, and disables compression where it is too large."""

import logging
from collections.abc import Sequence

import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.coordination.timeouts import LONG_SECONDS
from tfdist.diagnostics.interface import Periodic, RunView
from tfdist.diagnostics.observed_reducer import ObservingReducer, ObservingTrial
from tfdist.gradients import Bucketed, Reduced, Reducer, Sum

_log = logging.getLogger(__name__)


class CompressionErrorMonitor(Periodic):
    """Periodically reduces the compressed gradients also exactly; disables compression where the error is too large.

    The relative error of a gradient is ||sent - exact|| / ||exact||, of the sums over replicas of what the step was to
    send: with error feedback this includes the accumulated error. If it exceeds the limit, all processes sum that
    gradient exactly from this step on; the accumulated error is added to the first exact sum.
    """

    def __init__(self, run_view: RunView, every: int, max_error: float):
        """Initializes the inspection.

        Args:
          run_view: the run to inspect.
          every: steps between measurements.
          max_error: largest relative error allowed; 0 for no limit.
        """
        super().__init__(every)
        self._steps = run_view.steps
        self._max_error = max_error
        self._observe = ObservingTrial(run_view, self._both_ways)

    def _both_ways(self) -> "BothWays":
        return BothWays(self._steps.reducer(), self._steps.specs, self._steps.compressed_names())

    def look(self, step: int) -> dict[str, float]:
        """See base class; `compression_error` and `compression_cosine`, the worst over all gradients."""
        watched, strategy = self._steps.compressed_names(), self._steps.strategy
        if not watched:
            return {}
        observed = self._observe(step)
        errors, cosines = ([float(strategy.local(x)[0]) for x in values] for values in zip(*observed, strict=True))
        found = strategy.peers.broadcast("guard", [errors, cosines], LONG_SECONDS)
        self._judge(step, dict(zip(watched, found[0], strict=True)))
        return {"compression_error": max(found[0]), "compression_cosine": min(found[1])}

    def _judge(self, step: int, errors: dict[str, float]) -> None:
        """Disables compression of gradients beyond the limit; all processes have the same errors, so they agree."""
        far = {name: error for name, error in errors.items() if not error <= self._max_error} if self._max_error else {}
        for name, error in far.items():
            _log.warning(
                "From step %d on, the gradient of %s is reduced without compression: the compression error was %.3g of "
                "its norm, more than --compression_max_error=%g.", step, name, error, self._max_error
            )  # fmt: skip
        self._steps.fall_back(list(far))


class BothWays(ObservingReducer):
    """Reduces with another reducer, and measures the error of its sums against exact ones.

    Attributes:
      observed: for each watched tensor, the relative error and the cosine of the last call, scalars.
    """

    def __init__(self, inner: Reducer, specs: Sequence[tf.TensorSpec], watched: Sequence[str]):
        """Wraps a reducer.

        Args:
          inner: reducer whose error is measured.
          specs: specs of all tensors.
          watched: names of the tensors to compare.
        """
        super().__init__(inner)
        self._specs = list(specs)
        self._watched = [i for i, spec in enumerate(specs) if spec.name in watched]

    def reduce(
        self, tensors: Sequence[tf.Tensor], state: Sequence[tf.Tensor], collectives: Collectives, *, name: str
    ) -> Reduced:
        """See base class."""
        kept = dict(zip((s.name for s in self.inner.state(self._specs)), state, strict=True))
        inner = self.inner.reduce(tensors, state, collectives, name=name)
        wanted = [tensors[i] + kept.get(f"{self._specs[i].name}/error", 0) for i in self._watched]
        exact = Bucketed(Sum()).reduce(wanted, [], collectives, name=f"{name}/exact").totals
        self.observed = [_distance(inner.totals[i], whole) for i, whole in zip(self._watched, exact, strict=True)]
        return inner


def _distance(sent: tf.Tensor, exact: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    norm = tf.norm(exact)
    error = tf.math.divide_no_nan(tf.norm(sent - exact), norm)
    return error, tf.math.divide_no_nan(tf.reduce_sum(sent * exact), norm * tf.norm(sent))
