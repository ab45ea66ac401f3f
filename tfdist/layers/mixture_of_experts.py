"""A mixture-of-experts layer, in place of a perceptron."""

import math
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.distribution.variable_layouts import parse_dims
from tfdist.errors import InputError
from tfdist.keras_internals import uncast_value
from tfdist.layers.sharding_constraint import constrain


class ExpertLoad(keras.metrics.Metric):
    """Sums the tokens of each expert and the dropped choices over batches."""

    def __init__(self, experts: int, **kwargs: Any):
        """Creates the metric; `kwargs`: as for `keras.metrics.Metric`."""
        super().__init__(name="load", **kwargs)
        self.tokens = self.add_variable((experts,), "zeros", name="tokens")
        self.dropped = self.add_variable((), "zeros", name="dropped")

    def update_state(self, tokens: tf.Tensor, dropped: tf.Tensor) -> None:
        """Adds a batch.

        Args:
          tokens: [experts], tokens of each expert.
          dropped: scalar, choices that were dropped.
        """
        for variable, addend in ((self.tokens, tokens), (self.dropped, dropped)):
            before = uncast_value(variable)  # mixed precision would otherwise sum in 16 bits
            variable.assign(before + tf.cast(addend, before.dtype))

    def result(self) -> dict[str, tf.Tensor]:
        """Returns each expert's fraction of the tokens, their coefficient of variation, and the dropped fraction."""
        tokens, dropped = tf.convert_to_tensor(self.tokens), tf.convert_to_tensor(self.dropped)
        total = tf.reduce_sum(tokens)
        parts = tf.math.divide_no_nan(tokens, total)
        each = {f"expert_{i}": part for i, part in enumerate(tf.unstack(parts))}
        variation = tf.math.reduce_std(parts) * parts.shape[0]
        return {"load_cv": variation, "dropped": tf.math.divide_no_nan(dropped, total + dropped), **each}


# Routing of tokens to experts: choices, capacity, overflow, and the losses that balance the load.
# Fedus et al., Switch Transformers, 2021 (arXiv:2101.03961); Lepikhin et al., GShard, 2020 (arXiv:2006.16668); Zoph et al.,
# ST-MoE, 2022 (arXiv:2202.08906).

OVERFLOWS = ("drop", "spill")


class Routes(NamedTuple):
    """The routes of the tokens of each group.

    Attributes:
      dispatch: [groups, tokens, experts, capacity]; 1 where a token has this slot of this expert.
      weights: [groups, tokens, experts]; weight of the result from each slot that a token has with an expert, else 0.
      load: [experts]; number of tokens that each expert processes, over all groups.
      dropped: scalar; number of choices for which there was no capacity.
    """

    dispatch: tf.Tensor
    weights: tf.Tensor
    load: tf.Tensor
    dropped: tf.Tensor


def capacity_of(tokens: int, experts: int, choices: int, factor: float) -> int:
    """Returns the capacity of each expert for the tokens of a group: `factor` times an even load, up to all tokens."""
    return max(1, min(tokens, math.ceil(factor * choices * tokens / experts)))


def routes(probabilities: tf.Tensor, real: tf.Tensor, choices: int, capacity: int, overflow: str) -> Routes:
    """Routes each token to its `choices` most probable experts, in the order of the tokens, first choices first.

    Gradients reach the router through the weights: an expert's probability with one choice (Switch); with several,
    divided by the sum of those of the chosen experts, whether they had capacity or not (GShard).

    Args:
      probabilities: [groups, tokens, experts]; output of the router.
      real: [groups, tokens]; 0 for padding, which is not routed, else 1.
      choices: number of experts per token.
      capacity: capacity of an expert for each group.
      overflow: "drop": the choice of a full expert is dropped. "spill": the token is sent to the least loaded expert in
        its group.
    """
    remaining, used, slots = probabilities, tf.zeros_like(probabilities[:, 0, :]), []
    overflowed, total = [], tf.zeros_like(real)
    for _ in range(choices):
        chosen = _chosen(remaining)
        remaining = remaining * (1 - chosen) - chosen  # below every probability, even 0
        total = total + tf.reduce_sum(probabilities * chosen, axis=-1)
        chosen = chosen * tf.expand_dims(real, -1)
        position = tf.cumsum(chosen, axis=1, exclusive=True) + tf.expand_dims(used, 1)
        assigned = chosen * tf.cast(position < capacity, chosen.dtype)
        used = used + tf.reduce_sum(assigned, axis=1)
        slots.append(_placed(assigned, position, capacity))
        overflowed.append(tf.reduce_sum(chosen - assigned, axis=-1))
    if overflow == "spill":
        for i, tokens in enumerate(overflowed):
            spilled = _spilled(tokens, used, capacity)
            used = used + tf.reduce_sum(spilled, axis=[1, 3])
            slots.append(spilled)
            overflowed[i] = tokens - tf.reduce_sum(spilled, axis=[2, 3])
    dispatch = tf.stop_gradient(tf.add_n(slots))
    # A spilled token may have two slots of one expert, which share its weight.
    weights = tf.math.divide_no_nan(probabilities, tf.reduce_sum(dispatch, axis=-1))
    if choices > 1:
        weights = weights / tf.expand_dims(total, -1)
    return Routes(dispatch, weights, tf.reduce_sum(used, axis=0), tf.add_n([tf.reduce_sum(x) for x in overflowed]))


def balance_loss(probabilities: tf.Tensor, real: tf.Tensor) -> tf.Tensor:
    """Returns Switch's load balancing loss: experts * sum_e f_e P_e of each group, averaged; 1 for an even load.

    f_e is the fraction of the group's real tokens whose first choice is e, P_e the mean probability of e.
    """
    parts, means = _mean_of_tokens(_chosen(probabilities), real), _mean_of_tokens(probabilities, real)
    return probabilities.shape[-1] * tf.reduce_mean(tf.reduce_sum(tf.stop_gradient(parts) * means, axis=-1))


def z_loss(logits: tf.Tensor, real: tf.Tensor) -> tf.Tensor:
    """Returns ST-MoE's z-loss: the mean square of the log of the softmax's denominator; keeps logits small.

    The mean is over the real tokens of each group, then over groups.
    """
    squares = tf.square(tf.reduce_logsumexp(logits, axis=-1, keepdims=True))
    return tf.reduce_mean(_mean_of_tokens(squares, real))


def _chosen(scores: tf.Tensor) -> tf.Tensor:
    """Returns 1 for the expert with the highest score of each token, else 0."""
    return tf.one_hot(tf.argmax(scores, axis=-1), scores.shape[-1], dtype=scores.dtype)


def _mean_of_tokens(values: tf.Tensor, real: tf.Tensor) -> tf.Tensor:
    """Maps [groups, tokens, n] to [groups, n]: the mean over real tokens; 0 for a group without any."""
    total = tf.reduce_sum(values * tf.expand_dims(real, -1), axis=1)
    return tf.math.divide_no_nan(total, tf.reduce_sum(real, axis=1, keepdims=True))


def _placed(assigned: tf.Tensor, position: tf.Tensor, capacity: int) -> tf.Tensor:
    """Returns [groups, tokens, experts, capacity]: 1 at the slot of each token that was not dropped."""
    slot = tf.cast(tf.reduce_sum(position * assigned, axis=-1), tf.int32)
    return tf.einsum("gse,gsc->gsec", assigned, tf.one_hot(slot, capacity, dtype=assigned.dtype))


def _spilled(tokens: tf.Tensor, used: tf.Tensor, capacity: int) -> tf.Tensor:
    """Assigns slots to overflowed tokens: the i-th of a group gets its i-th free slot, from the least loaded expert on.

    Args:
      tokens: [groups, tokens]; 1 for overflowed tokens.
      used: [groups, experts]; number of slots taken, which are the first ones of each expert.
      capacity: capacity of each expert.
    """
    groups, experts = used.shape
    number = tf.reshape(tf.range(capacity, dtype=used.dtype), [1, capacity, 1])
    free = tf.cast(number >= tf.expand_dims(used, 1), used.dtype)  # [groups, capacity, experts]
    flat = tf.reshape(free, [-1 if groups is None else groups, capacity * experts])
    order = tf.cumsum(flat, axis=1, exclusive=True)
    turn = tf.cumsum(tokens, axis=1, exclusive=True)
    same = tf.cast(tf.equal(tf.expand_dims(turn, 2), tf.expand_dims(order, 1)), used.dtype)
    assigned = same * tf.expand_dims(tokens, 2) * tf.expand_dims(flat, 1)  # [groups, tokens, capacity * experts]
    shaped = tf.reshape(assigned, [-1 if groups is None else groups, tokens.shape[1], capacity, experts])
    return tf.transpose(shaped, [0, 1, 3, 2])


_DIMS = {
    "router": "embed *",
    "in_kernel": "experts embed expert_ffn",
    "in_bias": "experts expert_ffn",
    "out_kernel": "experts expert_ffn embed",
    "out_bias": "experts embed",
}


@keras.saving.register_keras_serializable(package="tfdist")
class MixtureOfExperts(keras.layers.Layer):
    """Two-layer perceptrons of which each token uses a few: Switch with one choice, GShard with two.

    A token is sent to the experts that the router finds most probable. Each expert has a capacity of `capacity_factor *
    choices * tokens / experts` tokens per example. What an expert gets from one example does not depend on other
    examples, so the result is the same on any number of replicas. On a mesh, the rule `experts:AXIS` shards experts
    over an axis, which may be the batch's; `expert_ffn` is the inner width. The router computes in float32 or better.

    `balance_weight` times Switch's load balancing loss and `z_weight` times ST-MoE's z-loss are added to the model's
    loss. The metrics, prefixed with the layer's name, are `expert_0`, `expert_1` ..., the fraction of the tokens that
    each expert processed, `load_cv`, their coefficient of variation, and `dropped`, the fraction of the choices for
    which there was no capacity.

    Cost for a batch of B examples of S tokens of width M, with E experts of capacity C: the experts' matrix products,
    and two of B S E C M to move tokens; memory for two tensors of B S E C. The papers' noise (Switch's jitter, GShard's
    random second choice) is omitted.

    Fedus et al., Switch Transformers, 2021 (arXiv:2101.03961); Lepikhin et al., GShard, 2020 (arXiv:2006.16668); Zoph
    et al., ST-MoE, 2022 (arXiv:2202.08906).
    """

    def __init__(
        self,
        experts: int,
        width: int,
        *,
        choices: int = 2,
        capacity_factor: float = 1.25,
        evaluation_capacity_factor: float = 2.0,
        overflow: str = "drop",
        activation: Any = "gelu",
        balance_weight: float = 0.01,
        z_weight: float = 0.001,
        kernel_initializer: Any = "glorot_uniform",
        **kwargs: Any,
    ):
        """Validates and stores the arguments.

        Args:
          experts: number of experts, at least 1.
          width: inner width of each expert, at least 1.
          choices: number of experts per token, at most `experts`.
          capacity_factor: capacity of an expert as a multiple of an even load, above 0; experts / choices fits every
            token.
          evaluation_capacity_factor: the same, outside of training.
          overflow: "drop": a token skips an expert that is full, and gets zeros if all its experts are full. "spill":
            it is sent to the expert with the least load among the tokens of its example.
          activation: activation between an expert's two layers.
          balance_weight: weight of the load balancing loss, at least 0.
          z_weight: weight of the router's z-loss, at least 0.
          kernel_initializer: initializer of each expert's kernels and of the router.
          **kwargs: as for `keras.layers.Layer`.

        Raises:
          InputError: an argument is out of range.
        """
        super().__init__(**kwargs)
        self.supports_masking = True
        self.experts, self.width, self.choices = experts, width, choices
        self.capacity_factor, self.evaluation_capacity_factor = capacity_factor, evaluation_capacity_factor
        self.overflow = overflow
        self.activation = keras.activations.get(activation)
        self.balance_weight, self.z_weight = balance_weight, z_weight
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self._check()
        self.load = ExpertLoad(experts)

    def _check(self) -> None:
        ranges = (
            ("experts", self.experts >= 1, "at least 1"),
            ("width", self.width >= 1, "at least 1"),
            ("choices", 1 <= self.choices <= self.experts, f"from 1 to the {self.experts} experts"),
            ("capacity_factor", self.capacity_factor > 0, "above 0"),
            ("evaluation_capacity_factor", self.evaluation_capacity_factor > 0, "above 0"),
            ("overflow", self.overflow in OVERFLOWS, " or ".join(OVERFLOWS)),
            ("balance_weight", self.balance_weight >= 0, "at least 0"),
            ("z_weight", self.z_weight >= 0, "at least 0"),
        )
        for name, fits, rule in ranges:
            if not fits:
                raise InputError(f"MixtureOfExperts: {name} must be {rule}. Received: {getattr(self, name)}.")

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """See base class."""
        if len(input_shape) != 3 or None in input_shape[1:]:
            raise InputError(
                "MixtureOfExperts takes [batch, tokens, embed] with the last two dims known: the tokens of an example "
                f"share the experts' capacity. Received: {tuple(input_shape)}."
            )
        embed, first = input_shape[-1], self.kernel_initializer
        self.router = self.add_weight((embed, self.experts), first, name="router", autocast=False)
        self.in_kernel = self.add_weight((self.experts, embed, self.width), _EachExpert(first, 1), name="in_kernel")
        self.in_bias = self.add_weight((self.experts, self.width), "zeros", name="in_bias")
        other = _EachExpert(first, 1 + self.experts)
        self.out_kernel = self.add_weight((self.experts, self.width, embed), other, name="out_kernel")
        self.out_bias = self.add_weight((self.experts, embed), "zeros", name="out_bias")
        for name, dims in _DIMS.items():
            getattr(self, name).tfdist_dims = parse_dims(dims)

    def call(self, inputs: tf.Tensor, mask: tf.Tensor | None = None, training: bool = False) -> tf.Tensor:
        """Returns a tensor of the shape and dtype of `inputs`, [batch, tokens, embed]; masked tokens are not routed."""
        tokens = constrain(inputs, "batch * embed", f"the input of {self.path}")
        precision = tf.float64 if inputs.dtype == tf.float64 else tf.float32
        logits = tf.einsum("gsm,me->gse", tf.cast(tokens, precision), tf.cast(self.router, precision))
        probabilities = tf.nn.softmax(logits)
        real = tf.ones_like(logits[:, :, 0]) if mask is None else tf.cast(mask, precision)
        capacity = self.capacity(inputs.shape[1], training)
        routing = routes(probabilities, real, self.choices, capacity, self.overflow)
        if self.balance_weight:
            self.add_loss(self.balance_weight * balance_loss(probabilities, real))
        if self.z_weight:
            self.add_loss(self.z_weight * z_loss(logits, real))
        self.load.update_state(routing.load, routing.dropped)
        # Replicated before it is sharded over experts; otherwise the engine would shard the routing and gather within
        # it.
        replicated = constrain(routing.dispatch, "batch * * *", f"the routes of {self.path}")
        dispatch = tf.cast(constrain(replicated, "batch * experts? *", f"the routes of {self.path}"), inputs.dtype)
        weights = tf.cast(constrain(routing.weights, "batch * *", f"the weights of {self.path}"), inputs.dtype)
        weights = constrain(weights, "batch * experts?", f"the weights of {self.path}")
        sent = tf.einsum("gsec,gsm->egcm", dispatch, tokens)
        computed = self._at_rows(self._at_experts(self._computed(self._at_experts(self._at_rows(sent)))))
        outputs = tf.einsum("gsec,egcm->gsm", dispatch * tf.expand_dims(weights, -1), computed)
        return constrain(outputs, "batch * embed", f"the output of {self.path}")

    def capacity(self, tokens: int, training: bool) -> int:
        """Returns the capacity of each expert for the tokens of an example."""
        factor = self.capacity_factor if training else self.evaluation_capacity_factor
        return capacity_of(tokens, self.experts, self.choices, factor)

    def _at_rows(self, x: tf.Tensor) -> tf.Tensor:
        """Lays out [experts, batch, capacity, embed] like the rows from which the tokens come."""
        return constrain(x, "experts? batch * *", f"the tokens of {self.path}")

    def _at_experts(self, x: tf.Tensor) -> tf.Tensor:
        """Lays out the same on the experts' devices: an all-to-all if experts and rows are sharded over one axis."""
        return constrain(x, "experts batch? * *", f"the experts' tokens of {self.path}")

    def _computed(self, x: tf.Tensor) -> tf.Tensor:
        """Applies each expert to its tokens."""
        inner = tf.einsum("egcm,emf->egcf", x, tf.cast(self.in_kernel, x.dtype))
        inner = self.activation(inner + _over_places(self.in_bias, x.dtype))
        return tf.einsum("egcf,efm->egcm", inner, tf.cast(self.out_kernel, x.dtype)) + _over_places(
            self.out_bias, x.dtype
        )

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """See base class."""
        return input_shape

    def get_config(self) -> dict[str, Any]:
        """See base class."""
        return {
            **super().get_config(),
            "experts": self.experts,
            "width": self.width,
            "choices": self.choices,
            "capacity_factor": self.capacity_factor,
            "evaluation_capacity_factor": self.evaluation_capacity_factor,
            "overflow": self.overflow,
            "activation": keras.activations.serialize(self.activation),
            "balance_weight": self.balance_weight,
            "z_weight": self.z_weight,
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
        }


class _EachExpert:
    """An initializer of [experts, ...] that initializes each expert separately, with different values."""

    def __init__(self, initializer: keras.initializers.Initializer, first: int):
        self._initializer, self._first = initializer, first

    def __call__(self, shape: tuple[int, ...], dtype: Any = None) -> tf.Tensor:
        return tf.stack([self._of(self._first + i)(shape[1:], dtype=dtype) for i in range(shape[0])])

    def _of(self, number: int) -> keras.initializers.Initializer:
        seed = getattr(self._initializer, "seed", None)
        if not isinstance(seed, int):
            return self._initializer
        return type(self._initializer).from_config({**self._initializer.get_config(), "seed": (seed + number) % 2**31})


def _over_places(bias: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Reshapes [experts, n] to [experts, 1, 1, n]."""
    return tf.expand_dims(tf.expand_dims(tf.cast(bias, dtype), 1), 1)
