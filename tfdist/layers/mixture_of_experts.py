"""A mixture-of-experts layer, which can replace the perceptron of a transformer block."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.distribution.variable_layouts import parse_dims
from tfdist.errors import InputError
from tfdist.keras_internals import uncast_value
from tfdist.layers.sharding_constraint import constrain


class ExpertLoad(keras.metrics.Metric):
    """Counts the tokens of each expert, and the dropped choices, over batches."""

    def __init__(self, experts: int, **kwargs: Any):
        super().__init__(name="load", **kwargs)
        self.tokens = self.add_variable((experts,), "zeros", name="tokens")
        self.dropped = self.add_variable((), "zeros", name="dropped")

    def update_state(self, tokens: tf.Tensor, dropped: tf.Tensor) -> None:
        """Adds the counts of a batch: `tokens`, [experts], for each expert, and `dropped` choices, a scalar."""
        for variable, addend in ((self.tokens, tokens), (self.dropped, dropped)):
            previous = uncast_value(variable)  # mixed precision would otherwise sum in 16 bits
            variable.assign(previous + tf.cast(addend, previous.dtype))

    def result(self) -> dict[str, tf.Tensor]:
        """Returns each expert's fraction of the tokens, the coefficient of variation, and the dropped fraction."""
        tokens, dropped = tf.convert_to_tensor(self.tokens), tf.convert_to_tensor(self.dropped)
        total = tf.reduce_sum(tokens)
        fractions = tf.math.divide_no_nan(tokens, total)
        expert_fractions = {f"expert_{i}": fraction for i, fraction in enumerate(tf.unstack(fractions))}
        variation = tf.math.reduce_std(fractions) * fractions.shape[0]
        return {"load_cv": variation, "dropped": tf.math.divide_no_nan(dropped, total + dropped), **expert_fractions}


# Routing of tokens to experts: choices, capacity, overflow, and the losses that balance the experts; see `MixtureOfExperts`
# for the papers.

OVERFLOWS = ("drop", "spill")


class Routes(NamedTuple):
    """The assignment of the tokens of each group to experts."""

    dispatch: tf.Tensor  # [groups, tokens, experts, capacity]; 1 if a token has this slot of this expert, else 0
    weights: tf.Tensor  # [groups, tokens, experts]; weight of an expert's output for each slot of a token
    expert_tokens: tf.Tensor  # [experts]; number of tokens that each expert processes, over all groups
    dropped: tf.Tensor  # scalar; number of choices for which there was no capacity


def expert_capacity(tokens: int, experts: int, choices: int, factor: float) -> int:
    """Returns each expert's capacity for the tokens of a group: `factor` times an even distribution, up to all tokens."""
    return max(1, min(tokens, math.ceil(factor * choices * tokens / experts)))


def routes(probabilities: tf.Tensor, token_mask: tf.Tensor, choices: int, capacity: int, overflow: str) -> Routes:
    """Routes each token to its `choices` most probable experts, in the order of the tokens, first choices first.

    Gradients reach the router through the weights. With one choice, a weight is the expert's probability (Switch); with
    several choices, it is divided by the sum over the chosen experts, whether or not they have capacity (GShard).

    Args:
      probabilities: [groups, tokens, experts]; output of the router.
      token_mask: [groups, tokens]; 1 for tokens, 0 for padding, which is not routed.
      choices: number of experts per token.
      capacity: number of tokens of each group that an expert can process.
      overflow: "drop": the choice of a full expert is dropped. "spill": the token is sent to the expert with the fewest
        tokens of its group.
    """
    remaining_scores, used_slots, slots = probabilities, tf.zeros_like(probabilities[:, 0, :]), []
    overflow_tokens, total = [], tf.zeros_like(token_mask)
    for _ in range(choices):
        choice = _top_expert(remaining_scores)
        remaining_scores = remaining_scores * (1 - choice) - choice  # below every probability, even 0
        total = total + tf.reduce_sum(probabilities * choice, axis=-1)
        choice = choice * tf.expand_dims(token_mask, -1)
        position = tf.cumsum(choice, axis=1, exclusive=True) + tf.expand_dims(used_slots, 1)
        accepted_choice = choice * tf.cast(position < capacity, choice.dtype)
        used_slots = used_slots + tf.reduce_sum(accepted_choice, axis=1)
        slots.append(_place(accepted_choice, position, capacity))
        overflow_tokens.append(tf.reduce_sum(choice - accepted_choice, axis=-1))
    if overflow == "spill":
        for i, tokens in enumerate(overflow_tokens):
            spill = _spill(tokens, used_slots, capacity)
            used_slots = used_slots + tf.reduce_sum(spill, axis=[1, 3])
            slots.append(spill)
            overflow_tokens[i] = tokens - tf.reduce_sum(spill, axis=[2, 3])
    dispatch = tf.stop_gradient(tf.add_n(slots))
    # A spilled token may have two slots of one expert; the weight is then divided between the slots.
    weights = tf.math.divide_no_nan(probabilities, tf.reduce_sum(dispatch, axis=-1))
    if choices > 1:
        weights = weights / tf.expand_dims(total, -1)
    dropped = tf.add_n([tf.reduce_sum(x) for x in overflow_tokens])
    return Routes(dispatch, weights, tf.reduce_sum(used_slots, axis=0), dropped)


def balance_loss(probabilities: tf.Tensor, token_mask: tf.Tensor) -> tf.Tensor:
    """Returns Switch's load balancing loss: experts * sum_e f_e P_e, averaged over groups; 1 for an even distribution.

    f_e is the fraction of the group's real tokens whose first choice is e, and P_e is the mean probability of e.
    """
    fractions, means = _token_mean(_top_expert(probabilities), token_mask), _token_mean(probabilities, token_mask)
    return probabilities.shape[-1] * tf.reduce_mean(tf.reduce_sum(tf.stop_gradient(fractions) * means, axis=-1))


def z_loss(logits: tf.Tensor, token_mask: tf.Tensor) -> tf.Tensor:
    """Returns ST-MoE's z-loss, which keeps logits small: the mean square of the log of the softmax's denominator.

    The mean is taken over the real tokens of each group, then over groups.
    """
    squares = tf.square(tf.reduce_logsumexp(logits, axis=-1, keepdims=True))
    return tf.reduce_mean(_token_mean(squares, token_mask))


def _top_expert(scores: tf.Tensor) -> tf.Tensor:
    """Returns the one-hot encoding of the expert with the highest score, for each token."""
    return tf.one_hot(tf.argmax(scores, axis=-1), scores.shape[-1], dtype=scores.dtype)


def _token_mean(values: tf.Tensor, token_mask: tf.Tensor) -> tf.Tensor:
    """Returns the mean of [groups, tokens, n] over real tokens, [groups, n]; 0 for a group without real tokens."""
    total = tf.reduce_sum(values * tf.expand_dims(token_mask, -1), axis=1)
    return tf.math.divide_no_nan(total, tf.reduce_sum(token_mask, axis=1, keepdims=True))


def _place(accepted_choice: tf.Tensor, position: tf.Tensor, capacity: int) -> tf.Tensor:
    """Returns [groups, tokens, experts, capacity]: 1 at the slot of each accepted choice, else 0."""
    slot = tf.cast(tf.reduce_sum(position * accepted_choice, axis=-1), tf.int32)
    return tf.einsum("gse,gsc->gsec", accepted_choice, tf.one_hot(slot, capacity, dtype=accepted_choice.dtype))


def _spill(tokens: tf.Tensor, used_slots: tf.Tensor, capacity: int) -> tf.Tensor:
    """Assigns slots to overflowing tokens: the i-th token of a group gets the i-th free slot, emptiest expert first.

    `tokens`, [groups, tokens], is 1 for overflowing tokens. `used_slots`, [groups, experts], is the number of occupied
    slots, which are the first slots of each expert.
    """
    groups, experts = used_slots.shape
    slot_index = tf.reshape(tf.range(capacity, dtype=used_slots.dtype), [1, capacity, 1])
    is_free = tf.cast(slot_index >= tf.expand_dims(used_slots, 1), used_slots.dtype)  # [groups, capacity, experts]
    free = tf.reshape(is_free, [-1 if groups is None else groups, capacity * experts])
    slot_order = tf.cumsum(free, axis=1, exclusive=True)
    token_order = tf.cumsum(tokens, axis=1, exclusive=True)
    is_match = tf.cast(tf.equal(tf.expand_dims(token_order, 2), tf.expand_dims(slot_order, 1)), used_slots.dtype)
    assignment = is_match * tf.expand_dims(tokens, 2) * tf.expand_dims(free, 1)  # [groups, tokens, capacity * experts]
    result = tf.reshape(assignment, [-1 if groups is None else groups, tokens.shape[1], capacity, experts])
    return tf.transpose(result, [0, 1, 3, 2])


@keras.saving.register_keras_serializable(package="tfdist")
class MixtureOfExperts(keras.layers.Layer):
    """Two-layer perceptrons (experts), of which each token uses only some: Switch with one choice, GShard with two.

    Each token is sent to its most probable experts. Each expert has a capacity of `capacity_factor * choices * tokens /
    experts` tokens per example. The routing of an example does not depend on other examples, so the result is the same on
    any number of replicas. On a mesh, the rule `experts:AXIS` shards experts over an axis, which may be the batch axis;
    `expert_ffn` is the name of the inner dim. The router computes in float32 or float64.

    `balance_weight` times Switch's load balancing loss and `z_weight` times ST-MoE's z-loss are added to the model's
    loss. The metrics, prefixed with the layer's name, are `expert_0`, `expert_1` ..., the fraction of the tokens that
    each expert processed; `load_cv`, the coefficient of variation of these fractions; and `dropped`, the fraction of
    choices for which there was no capacity.

    Cost for a batch of B examples of S tokens of width M, with E experts of capacity C: the experts' matrix products, and
    two matrix products with B S E C M multiplications to move tokens; memory for two tensors of B S E C elements. The
    papers' noise (Switch's jitter, GShard's random second choice) is omitted.

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
          capacity_factor: capacity of an expert as a multiple of an even distribution of tokens, above 0; experts / choices
            is enough for every token.
          evaluation_capacity_factor: capacity factor outside of training.
          overflow: "drop": a token skips an expert that is full, and gets zeros if all its experts are full. "spill": it
            is sent to the expert with the fewest tokens of its example.
          activation: activation between an expert's two layers.
          balance_weight: weight of the load balancing loss, at least 0.
          z_weight: weight of the router's z-loss, at least 0.
          kernel_initializer: initializer of each expert's kernels and of the router.
          **kwargs: arguments of `keras.layers.Layer`.

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
        if len(input_shape) != 3 or None in input_shape[1:]:
            raise InputError(
                "The input of MixtureOfExperts must be [batch, tokens, embed] with the last two dims known, because the "
                f"capacity of experts depends on the number of tokens. Received: {tuple(input_shape)}."
            )
        kernel, experts = self.kernel_initializer, self.experts
        sizes = {"embed": input_shape[-1], "experts": experts, "*": experts, "expert_ffn": self.width}
        weights = {
            "router": ("embed *", kernel),
            "in_kernel": ("experts embed expert_ffn", _initializer_per_expert(kernel, 1)),
            "in_bias": ("experts expert_ffn", "zeros"),
            "out_kernel": ("experts expert_ffn embed", _initializer_per_expert(kernel, 1 + experts)),
            "out_bias": ("experts embed", "zeros"),
        }
        for name, (dims, initializer) in weights.items():
            shape = [sizes[dim] for dim in dims.split()]
            weight = self.add_weight(shape, initializer, name=name, autocast=name != "router")
            weight.tfdist_dims = parse_dims(dims)
            setattr(self, name, weight)

    def call(self, inputs: tf.Tensor, mask: tf.Tensor | None = None, training: bool = False) -> tf.Tensor:
        """Returns a tensor of the shape and dtype of `inputs`, [batch, tokens, embed]; masked tokens are not routed."""
        tokens = constrain(inputs, "batch * embed", f"the input of {self.path}")
        precision = tf.float64 if inputs.dtype == tf.float64 else tf.float32
        logits = tf.einsum("gsm,me->gse", tf.cast(tokens, precision), tf.cast(self.router, precision))
        probabilities = tf.nn.softmax(logits)
        token_mask = tf.ones_like(logits[:, :, 0]) if mask is None else tf.cast(mask, precision)
        capacity = self.capacity(inputs.shape[1], training)
        routing = routes(probabilities, token_mask, self.choices, capacity, self.overflow)
        if self.balance_weight:
            self.add_loss(self.balance_weight * balance_loss(probabilities, token_mask))
        if self.z_weight:
            self.add_loss(self.z_weight * z_loss(logits, token_mask))
        self.load.update_state(routing.expert_tokens, routing.dropped)
        # The routes are replicated before they are sharded over experts; otherwise the engine would shard the routing.
        dispatch = constrain(routing.dispatch, "batch * * *", f"the routes of {self.path}")
        dispatch = tf.cast(constrain(dispatch, "batch * experts? *", f"the routes of {self.path}"), inputs.dtype)
        weights = tf.cast(constrain(routing.weights, "batch * *", f"the weights of {self.path}"), inputs.dtype)
        weights = constrain(weights, "batch * experts?", f"the weights of {self.path}")
        # The experts' tokens, [experts, batch, capacity, embed], are sharded by rows before and after they are sharded by
        # experts. The change is an all-to-all if experts and rows are sharded over the same axis.
        by_rows = ("experts? batch * *", f"the tokens of {self.path}")
        by_experts = ("experts batch? * *", f"the experts' tokens of {self.path}")
        expert_inputs = constrain(tf.einsum("gsec,gsm->egcm", dispatch, tokens), *by_rows)
        expert_outputs = constrain(self._apply_experts(constrain(expert_inputs, *by_experts)), *by_experts)
        expert_outputs = constrain(expert_outputs, *by_rows)
        outputs = tf.einsum("gsec,egcm->gsm", dispatch * tf.expand_dims(weights, -1), expert_outputs)
        return constrain(outputs, "batch * embed", f"the output of {self.path}")

    def capacity(self, tokens: int, training: bool) -> int:
        """Returns the capacity of each expert for the tokens of an example."""
        factor = self.capacity_factor if training else self.evaluation_capacity_factor
        return expert_capacity(tokens, self.experts, self.choices, factor)

    def _apply_experts(self, x: tf.Tensor) -> tf.Tensor:
        hidden = tf.einsum("egcm,emf->egcf", x, tf.cast(self.in_kernel, x.dtype))
        hidden = self.activation(hidden + tf.cast(self.in_bias, x.dtype)[:, None, None, :])
        outputs = tf.einsum("egcf,efm->egcm", hidden, tf.cast(self.out_kernel, x.dtype))
        return outputs + tf.cast(self.out_bias, x.dtype)[:, None, None, :]

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        return input_shape

    def get_config(self) -> dict[str, Any]:
        names = "experts width choices capacity_factor evaluation_capacity_factor overflow balance_weight z_weight"
        return {
            **super().get_config(),
            **{name: getattr(self, name) for name in names.split()},
            "activation": keras.activations.serialize(self.activation),
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
        }


def _initializer_per_expert(initializer: keras.initializers.Initializer, first: int) -> Callable[..., tf.Tensor]:
    """Returns an initializer for [experts, ...] that initializes each expert separately, with different values."""

    def initialize(shape: tuple[int, ...], dtype: Any = None) -> tf.Tensor:
        seed, initializers = getattr(initializer, "seed", None), [initializer] * shape[0]
        if isinstance(seed, int):
            config, seeds = initializer.get_config(), [(seed + first + i) % 2**31 for i in range(shape[0])]
            initializers = [type(initializer).from_config({**config, "seed": each}) for each in seeds]
        return tf.stack([each(shape[1:], dtype=dtype) for each in initializers])

    return initialize
