"""Training with delayed gradients on one device, by the equation: what pipelines without a flush are compared with."""

from collections.abc import Mapping

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.strategies.pipeline_cases import Case, Outcome, make_trainer, outcome_of
from tfdist.data import ArraySource, Pipeline

LOGGED_EVERY = 5


def train_delayed(case: Case, delays: Mapping[str, int]) -> Outcome:
    """Trains with gradients of older weights: w(t + 1) = update(w(t), gradient(..., w_i(t - D_i), ...)).

    Args:
      case: the case; of its schedule nothing is used.
      delays: D_i by paths of trainable variables.
    """
    strategy = tfdist.load_strategy("single", environment={})
    trainer, made = make_trainer(strategy, case)
    model, optimizer = trainer.model, trainer.model.optimizer
    weights = model.trainable_variables
    optimizer.build(weights)
    assert made.weight is None
    batches = iter(Pipeline(ArraySource((made.x, made.y)), case.batch_size, seed=3).dataset(range(1), 1))
    versions = [[variable.numpy() for variable in weights]]
    losses = []
    for step in range(case.steps):
        x, y = next(batches)
        for place, variable in enumerate(weights):
            variable.assign(versions[max(step - delays[variable.path], 0)][place])
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, y, model(x, training=True), training=True)
        found = tape.gradient(loss, [variable.value for variable in weights])
        # Also of embeddings, as tfdist sends them. The optimizer does not get variables without a gradient.
        pairs = [(tf.convert_to_tensor(g), v) for g, v in zip(found, weights, strict=True) if g is not None]
        for place, variable in enumerate(weights):
            variable.assign(versions[step][place])
        optimizer.apply(*map(list, zip(*pairs, strict=True)))
        versions.append([variable.numpy() for variable in weights])
        losses.append(float(loss))
    means = np.reshape(losses, (-1, LOGGED_EVERY)).mean(axis=1)
    keras.utils.clear_session(free_memory=False)
    return outcome_of(trainer, made, [{"loss": float(loss)} for loss in means])
