"""LARS: layer-wise learning rates, for batches so large that a single rate does not suit all variables."""

import re
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from tfdist.errors import InputError


@keras.saving.register_keras_serializable(package="tfdist")
class MomentumCorrectedSGD(keras.optimizers.SGD):
    r"""`keras.optimizers.SGD` with momentum correction (Goyal et al., arXiv:1706.02677, section 3).

    For a variable w with gradient g, momentum m and the learning rate r_t of this update:

        u = m u + g
        w = w - r_t u                    nesterov: w - r_t (m u + g)

    Keras's SGD includes the rate in its velocity, v = m v + r_t g: past gradients have too little weight while the rate
    grows, and too much while it falls. The paper corrects v by r_t / r_(t-1), which makes it r_t u. Storing u instead is
    equivalent, needs no previous rate, and allows a rate of zero. With a constant rate, or without momentum, this is
    Keras's SGD up to rounding. Memory: one momentum variable per variable. The arguments are those of
    `keras.optimizers.SGD`.
    """

    def update_step(self, gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        if not self.momentum:
            super().update_step(gradient, variable, learning_rate)
            return
        rate = ops.cast(learning_rate, variable.dtype)
        step = ops.cast(ops.convert_to_tensor(gradient), variable.dtype)
        slot = self.momentums[self._get_variable_index(variable)]
        velocity = self.momentum * ops.convert_to_tensor(slot) + step
        self.assign(slot, velocity)
        self.assign_sub(variable, rate * (self.momentum * velocity + step if self.nesterov else velocity))


# Patterns of paths of variables for which neither weight decay nor rate adaptation is suitable.
NORMS_AND_BIASES = (r"(^|/)(bias|beta|gamma)$", r"(?i)norm[^/]*/[^/]+$")


@keras.saving.register_keras_serializable(package="tfdist")
class LARS(keras.optimizers.Optimizer):
    r"""Layer-wise adaptive rate scaling (You, Gitman and Ginsburg, arXiv:1708.03888, algorithm 1).

    For each variable w with gradient g, learning rate r, trust coefficient h, weight decay b and momentum m:

        trust = h ||w|| / (||g|| + b ||w|| + epsilon)      1 where ||w||, or both ||g|| and b ||w||, are zero
        v = m v + r trust (g + b w)
        w = w - v                                          nesterov: w - (m v + r trust (g + b w))

    With momentum correction the rate is applied outside of v, as in `MomentumCorrectedSGD`; for a constant rate the two
    are the same. Norms are computed in float32, or float64 for a float64 variable. Gradients are already reduced, so
    every replica computes the same norms without communication. Memory: one momentum variable per variable.

    Args:
      learning_rate: a float or a schedule. The trust makes updates small: with its default coefficient, usual rates are
        1 to 30. Variables excluded from adaptation use the rate unchanged. If the model does not tolerate that, adapt all
        variables, or use a lower rate with a larger coefficient.
      momentum: in [0, 1).
      nesterov: whether to use Nesterov momentum.
      weight_decay: coefficient of the weights in the gradient, inside the trust; at least 0. None means 0.
      trust_coefficient: above 0.
      epsilon: added to the norms; at least 0.
      exclude_from_weight_decay: regular expressions; a variable is excluded if its path contains a match.
      exclude_from_layer_adaptation: regular expressions of variables whose trust is 1.
      momentum_correction: whether past updates in the momentum are rescaled when the learning rate changes.
      **kwargs: as for `keras.optimizers.Optimizer`.

    Raises:
      InputError: an argument is out of range.
    """

    def __init__(
        self,
        learning_rate: Any = 1.0,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float | None = 0.0,
        trust_coefficient: float = 0.001,
        epsilon: float = 1e-8,
        exclude_from_weight_decay: str | Sequence[str] = NORMS_AND_BIASES,
        exclude_from_layer_adaptation: str | Sequence[str] = NORMS_AND_BIASES,
        momentum_correction: bool = False,
        **kwargs: Any,
    ):
        # The base class applies weight decay to the weights, outside of the trust: it is disabled.
        super().__init__(learning_rate=learning_rate, weight_decay=None, **kwargs)
        _check(0 <= momentum < 1, "momentum must be in [0, 1)", momentum)
        _check((weight_decay or 0) >= 0, "weight_decay must be at least 0", weight_decay)
        _check(trust_coefficient > 0, "trust_coefficient must be above 0", trust_coefficient)
        _check(epsilon >= 0, "epsilon must be at least 0", epsilon)
        self.momentum = momentum
        self.nesterov = nesterov
        self.gradient_decay = weight_decay or 0.0
        self.trust_coefficient = trust_coefficient
        self.epsilon = epsilon
        self.momentum_correction = momentum_correction
        self.decay_exclusions = _as_patterns(exclude_from_weight_decay)
        self.adaptation_exclusions = _as_patterns(exclude_from_layer_adaptation)

    def build(self, variables: Sequence[keras.Variable]) -> None:
        if self.built:
            return
        super().build(variables)
        paths = [getattr(variable, "path", variable.name) for variable in variables]
        self.uses_decay = [not _matches_any(self.decay_exclusions, path) for path in paths]
        self.uses_adaptation = [not _matches_any(self.adaptation_exclusions, path) for path in paths]
        self.momentums = self.add_optimizer_variables(variables, "momentum") if self.momentum else []

    def update_step(self, gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        index = self._get_variable_index(variable)
        dtype = "float64" if variable.dtype == tf.float64 else "float32"
        rate = ops.cast(learning_rate, dtype)
        weights = ops.cast(variable, dtype)
        direction = ops.cast(ops.convert_to_tensor(gradient), dtype)  # densifies the rows of an embedding's gradient
        decay = self.gradient_decay if self.uses_decay[index] else 0.0
        trust = self._trust(_norm(weights), _norm(direction), decay) if self.uses_adaptation[index] else 1.0
        step = trust * (direction + decay * weights)
        inner_rate, outer_rate = (1.0, rate) if self.momentum_correction else (rate, 1.0)
        step = inner_rate * step
        if self.momentum:
            slot = self.momentums[index]
            velocity = self.momentum * ops.cast(slot, dtype) + step
            self.assign(slot, velocity)
            step = self.momentum * velocity + step if self.nesterov else velocity
        self.assign_sub(variable, outer_rate * step)

    def exclude_from_weight_decay(
        self, var_list: Sequence[keras.Variable] | None = None, var_names: Sequence[str] | None = None
    ) -> None:
        """See base class. Replaces the expressions passed to the constructor."""
        if self.built:
            raise ValueError("`exclude_from_weight_decay()` must be called before the optimizer is built.")
        patterns = [f"^{re.escape(variable.path)}$" for variable in var_list or ()]
        self.decay_exclusions = _as_patterns([*(var_names or ()), *patterns])

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {
            "momentum": self.momentum,
            "nesterov": self.nesterov,
            "weight_decay": self.gradient_decay,
            "trust_coefficient": self.trust_coefficient,
            "epsilon": self.epsilon,
            "exclude_from_weight_decay": list(self.decay_exclusions),
            "exclude_from_layer_adaptation": list(self.adaptation_exclusions),
            "momentum_correction": self.momentum_correction,
        }

    def _trust(self, weights_norm: tf.Tensor, gradient_norm: tf.Tensor, decay: float) -> tf.Tensor:
        update_norm = gradient_norm + decay * weights_norm
        is_valid = ops.logical_and(weights_norm > 0, update_norm > 0)
        divisor = ops.where(is_valid, update_norm + self.epsilon, ops.ones_like(update_norm))
        return ops.where(is_valid, self.trust_coefficient * weights_norm / divisor, ops.ones_like(update_norm))


def _norm(tensor: tf.Tensor) -> tf.Tensor:
    return ops.sqrt(ops.sum(ops.square(tensor)))


def _check(is_valid: bool, rule: str, received: Any) -> None:
    if not is_valid:
        raise InputError(f"LARS: {rule}. Received: {received}.")


def _as_patterns(patterns: str | Sequence[str]) -> tuple[str, ...]:
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def _matches_any(patterns: Sequence[str], path: str) -> bool:
    return any(re.search(pattern, path) for pattern in patterns)
