"""A mixture-of-experts layer, in place of a perceptron."""

from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import InputError
from tfdist.layers.expert_load import ExpertLoad
from tfdist.layers.routing import OVERFLOWS, balance_loss, capacity_of, routes, z_loss
from tfdist.layers.sharding_constraint import constrain
from tfdist.sharding.dim_names import parse_dims

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
        places = self.capacity(inputs.shape[1], training)
        found = routes(probabilities, real, self.choices, places, self.overflow)
        if self.balance_weight:
            self.add_loss(self.balance_weight * balance_loss(probabilities, real))
        if self.z_weight:
            self.add_loss(self.z_weight * z_loss(logits, real))
        self.load.update_state(found.load, found.dropped)
        # Replicated before it is sharded over experts; otherwise the engine would shard the routing and gather within
        # it.
        whole = constrain(found.dispatch, "batch * * *", f"the routes of {self.path}")
        dispatch = tf.cast(constrain(whole, "batch * experts? *", f"the routes of {self.path}"), inputs.dtype)
        weights = tf.cast(constrain(found.weights, "batch * *", f"the weights of {self.path}"), inputs.dtype)
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
