"""Parity tests for authors of strategies and reducers: training under a strategy and on one device, compared by variable.

Run them in float64, in which bugs exceed rounding errors by far. `run_case` trains, and `compare` measures the differences of
two outcomes. An entry of `CASES` adds a model and an optimizer to every suite.
"""

import dataclasses
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tfdist import keras_internals, models
from tfdist.collectives import Collectives
from tfdist.data import ArraySource
from tfdist.distribution.strategy import Strategy
from tfdist.gradients import Reducer, ReductionResult
from tfdist.gradients.reducer import Tensors
from tfdist.optimizers import LARS, MomentumCorrectedSGD, WarmupAndDecay
from tfdist.trainer.options import Schedule
from tfdist.trainer.trainer import Trainer

__all__ = ["CASES", "Case", "Outcome", "compare", "run_case"]

STEPS = 20
EXAMPLES = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A training run that must have the same result under every strategy.

    Attributes:
      model: a key of `MODELS`.
      optimizer: a key of `OPTIMIZERS`.
      batch_size: global batch size; 13 is not divisible by any number of replicas.
      weighted: whether examples have weights, some of which are 0.
      steps: number of updates.
      balance: how the examples of a batch are divided between several replicas; see `Trainer`.
    """

    model: str
    optimizer: str
    batch_size: int = 16
    weighted: bool = False
    steps: int = STEPS
    balance: str = "equal"

    def __str__(self) -> str:
        suffix = ("-weighted" if self.weighted else "") + (f"-{self.balance}" if self.balance != "equal" else "")
        return f"{self.model}-{self.optimizer}-{self.batch_size}{suffix}"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a case on one process.

    Attributes:
      variables: weights and moving statistics by path.
      losses: mean loss of each call of the compiled loop.
      evaluation: loss and metrics over all examples.
      digests: a hash of all variables for each local replica.
    """

    variables: dict[str, np.ndarray]
    losses: list[float]
    evaluation: dict[str, float]
    digests: list[str]


def _masked_model(**_: Any) -> keras.Model:
    """Returns a model with masked padding: the number of tokens in the loss differs between replicas."""
    inputs = keras.Input((6,), dtype="int32", name="tokens")
    hidden = keras.layers.Embedding(20, 8, mask_zero=True, name="embedding")(inputs)
    hidden = keras.layers.Dense(16, activation="gelu", name="hidden")(hidden)
    return keras.Model(inputs, keras.layers.Dense(8, name="logits")(hidden), name="masked")


def _regularized_model(**_: Any) -> keras.Model:
    """Returns a model with regularized weights, which are counted once, and activations, which are averaged over rows."""
    inputs = keras.Input((8, 8, 1), name="image")
    hidden = keras.layers.Flatten(name="flatten")(inputs)
    hidden = keras.layers.Dense(
        16, activation="tanh", kernel_regularizer="l2", activity_regularizer=keras.regularizers.L2(0.1), name="hidden"
    )(hidden)
    return keras.Model(inputs, keras.layers.Dense(10, name="logits")(hidden), name="regularized")


def _frozen_batch_norm_model(**sizes: Any) -> keras.Model:
    """Returns a CNN whose BatchNorm is in inference mode, for which local BatchNorm is exact."""
    model = models.build("cnn(filters=(4, 8))", **sizes)
    for layer in keras_internals.layers_of(model):
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.trainable = False
    return model


MODELS: Mapping[str, Callable[..., keras.Model]] = {
    "mlp": lambda **sizes: models.build("mlp(hidden=(16, 12))", **sizes),
    "cnn": lambda **sizes: models.build("cnn(filters=(4, 8), batch_norm='synchronized')", **sizes),
    "cnn_frozen": _frozen_batch_norm_model,
    "transformer": lambda **sizes: models.build("transformer(layers=1, width=16, heads=2, ffn=32)", **sizes),
    "experts": lambda **sizes: models.build("transformer(layers=2, width=16, heads=2, ffn=32, experts=4)", **sizes),
    "deep_transformer": lambda **sizes: models.build("transformer(layers=2, width=16, heads=2, ffn=32)", **sizes),
    "masked": _masked_model,
    "regularized": _regularized_model,
    "resnet50": lambda **sizes: models.build("resnet50(batch_norm='synchronized')", **sizes),
}

LANGUAGE_MODELS = ("transformer", "experts", "deep_transformer")

OPTIMIZERS: Mapping[str, Callable[[], keras.Optimizer]] = {
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adamw": lambda: keras.optimizers.AdamW(0.003),
    "lamb": lambda: keras.optimizers.Lamb(0.01),
    "lars": lambda: LARS(WarmupAndDecay(0.2, warmup_steps=5), weight_decay=0.001, trust_coefficient=0.05),
    "momentum_corrected_sgd": lambda: MomentumCorrectedSGD(
        WarmupAndDecay(0.05, warmup_steps=5, decay="cosine", total_steps=STEPS), momentum=0.9
    ),
}

CASES = (
    Case(model="mlp", optimizer="sgd"),
    Case(model="mlp", optimizer="adamw", batch_size=13),
    Case(model="cnn", optimizer="sgd", batch_size=13),
    Case(model="cnn", optimizer="adamw"),
    Case(model="cnn_frozen", optimizer="sgd", weighted=True),
    Case(model="transformer", optimizer="adamw", batch_size=13),
    Case(model="transformer", optimizer="sgd"),
    Case(model="experts", optimizer="adamw", batch_size=13),
    Case(model="masked", optimizer="sgd", batch_size=13),
    Case(model="mlp", optimizer="momentum_corrected_sgd", batch_size=13),
    Case(model="cnn", optimizer="lars", batch_size=13),
    Case(model="transformer", optimizer="lamb", batch_size=13),
    Case(model="regularized", optimizer="sgd", batch_size=13, weighted=True),
)

# Meshes of four devices, with layouts for all models: by columns, by rows, batch only, and with an axis of size 1.
MESHES: Mapping[str, tuple[str, str]] = {
    "2x2": ("data:2;model:2", "heads:model;ffn:model;out:model;vocab:model;experts:model"),
    "1x4": ("data:1;model:4", "ffn:model;in:model;experts:model"),
    "4x1": ("data:4;model:1", ""),
    "2x2x1": ("data:2;model:2;expert:1", "heads:model;in:model;embed:expert;experts:model"),
}

# These take a minute or more with each strategy.
SLOW_CASES = (Case(model="resnet50", optimizer="sgd", batch_size=8, steps=3),)


def run_case(strategy: Strategy, case: Case, **trainer_options: Any) -> Outcome:
    """Trains a case under a strategy, in the current precision, from weights and data that depend only on the case."""
    if strategy.replicas > 1:
        trainer_options = {"balance": case.balance, **trainer_options}
    source, trainer = source_of(case), make_trainer(strategy, case, **trainer_options)
    model, losses = trainer.model, []
    record_loss = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: losses.append(logs["loss"]))
    trainer.fit(
        source,
        batch_size=case.batch_size,
        steps=case.steps,
        schedule=Schedule(steps_per_call=4),
        callbacks=[record_loss],
        verbose=0,
    )
    evaluation = trainer.evaluate(source, batch_size=case.batch_size)
    replicas = [strategy.local(variable.value) for variable in model.variables]
    digests = [digest([values[i] for values in replicas]) for i in range(len(strategy.local_replicas))]
    variables = {v.path: np.asarray(values[0]) for v, values in zip(model.variables, replicas, strict=True)}
    return Outcome(variables, losses, evaluation, digests)


def make_trainer(strategy: Strategy, case: Case, **options: Any) -> Trainer:
    """Returns the trainer of a case, in the current precision; its model is not built.

    The initial weights depend only on the case.
    """
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(7)
    with strategy.scope():
        return Trainer(
            MODELS[case.model](**_sizes(case)),
            optimizer=OPTIMIZERS[case.optimizer](),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            seed=3,
            **options,
        )


class NoReduction(Reducer):
    """A faulty reducer that every suite must detect: each replica keeps its own gradients."""

    def reduce(self, tensors: Tensors, state: Tensors, collectives: Collectives, *, name: str) -> ReductionResult:
        """See base class; violates its contract on purpose."""
        return ReductionResult(list(tensors), list(tensors), [], list(tensors))


@dataclasses.dataclass(frozen=True)
class Difference:
    """The difference of a variable from its reference.

    Attributes:
      path: path of the variable.
      relative: ||a - b|| / ||b||.
      absolute: max |a - b|.
      noise: whether its true gradient is zero.
    """

    path: str
    relative: float
    absolute: float
    noise: bool


def compare(outcome: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray], model: str) -> list[Difference]:
    """Returns the differences of variables, the largest first; raises `KeyError` if the paths differ."""
    if set(outcome) != set(reference):
        raise KeyError(f"Both must have the same variables. Only one has: {sorted(set(outcome) ^ set(reference))}")
    differences = []
    for path, expected in reference.items():
        difference = np.asarray(outcome[path], np.float64) - np.asarray(expected, np.float64)
        scale = float(np.linalg.norm(np.asarray(expected, np.float64))) or 1.0
        absolute = float(np.max(np.abs(difference), initial=0.0))
        differences.append(Difference(path, float(np.linalg.norm(difference)) / scale, absolute, is_noise(path, model)))
    return sorted(differences, key=lambda d: (d.noise, -d.relative))


def is_noise(path: str, model: str) -> bool:
    """Returns whether a variable's true gradient is zero according to the model's table; its value is rounding error."""
    catalog_name = "transformer" if model in LANGUAGE_MODELS else model
    return any(re.search(pattern, path) for pattern in models.zero_gradient_patterns(catalog_name))


def _sizes(case: Case) -> dict[str, Any]:
    if case.model in LANGUAGE_MODELS:
        return {"input_shape": (12,), "classes": 12}
    return {"input_shape": (32, 32, 3) if case.model == "resnet50" else (8, 8, 1), "classes": 10}


def source_of(case: Case) -> ArraySource:
    """Returns the data of a case, `EXAMPLES` examples that depend only on the case."""
    random = np.random.default_rng(5)
    if case.model in LANGUAGE_MODELS:
        arrays: tuple[np.ndarray, ...] = tuple(random.integers(0, 12, (EXAMPLES, 12)) for _ in range(2))
    elif case.model == "masked":
        lengths = random.integers(1, 7, (EXAMPLES, 1))
        tokens = random.integers(1, 20, (EXAMPLES, 6)) * (np.arange(6) < lengths)
        arrays = (tokens.astype("int32"), random.integers(0, 8, (EXAMPLES, 6)))
    else:
        images = random.standard_normal((EXAMPLES, *_sizes(case)["input_shape"])).astype(keras.config.floatx())
        arrays = (images, random.integers(0, 10, EXAMPLES))
    if case.weighted:
        weights = random.uniform(0, 2, EXAMPLES) * (random.uniform(size=EXAMPLES) > 0.3)
        arrays = (*arrays, weights.astype(keras.config.floatx()))
    return ArraySource(arrays)


def digest(values: Sequence[Any]) -> str:
    """Returns a hash of the bytes of several tensors."""
    content = hashlib.sha256()
    for value in values:
        content.update(np.ascontiguousarray(value).tobytes())
    return content.hexdigest()
