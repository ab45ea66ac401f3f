"""Routing of tokens to experts: choices, capacity, overflow, and the losses that balance the load.

Fedus et al., Switch Transformers, 2021 (arXiv:2101.03961); Lepikhin et al., GShard, 2020 (arXiv:2006.16668); Zoph et
al., ST-MoE, 2022 (arXiv:2202.08906).
"""

import math
from typing import NamedTuple

import tensorflow as tf

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
    left, taken, places = probabilities, tf.zeros_like(probabilities[:, 0, :]), []
    overflowed, total = [], tf.zeros_like(real)
    for _ in range(choices):
        chosen = _chosen(left)
        left = left * (1 - chosen) - chosen  # below every probability, even 0
        total = total + tf.reduce_sum(probabilities * chosen, axis=-1)
        chosen = chosen * tf.expand_dims(real, -1)
        position = tf.cumsum(chosen, axis=1, exclusive=True) + tf.expand_dims(taken, 1)
        kept = chosen * tf.cast(position < capacity, chosen.dtype)
        taken = taken + tf.reduce_sum(kept, axis=1)
        places.append(_placed(kept, position, capacity))
        overflowed.append(tf.reduce_sum(chosen - kept, axis=-1))
    if overflow == "spill":
        for i, tokens in enumerate(overflowed):
            spilled = _spilled(tokens, taken, capacity)
            taken = taken + tf.reduce_sum(spilled, axis=[1, 3])
            places.append(spilled)
            overflowed[i] = tokens - tf.reduce_sum(spilled, axis=[2, 3])
    dispatch = tf.stop_gradient(tf.add_n(places))
    # A spilled token may have two slots of one expert, which share its weight.
    weights = tf.math.divide_no_nan(probabilities, tf.reduce_sum(dispatch, axis=-1))
    if choices > 1:
        weights = weights / tf.expand_dims(total, -1)
    return Routes(dispatch, weights, tf.reduce_sum(taken, axis=0), tf.add_n([tf.reduce_sum(x) for x in overflowed]))


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


def _placed(kept: tf.Tensor, position: tf.Tensor, capacity: int) -> tf.Tensor:
    """Returns [groups, tokens, experts, capacity]: 1 at the slot of each token that was not dropped."""
    place = tf.cast(tf.reduce_sum(position * kept, axis=-1), tf.int32)
    return tf.einsum("gse,gsc->gsec", kept, tf.one_hot(place, capacity, dtype=kept.dtype))


def _spilled(tokens: tf.Tensor, taken: tf.Tensor, capacity: int) -> tf.Tensor:
    """Assigns slots to overflowed tokens: the i-th of a group gets its i-th free slot, from the least loaded expert on.

    Args:
      tokens: [groups, tokens]; 1 for overflowed tokens.
      taken: [groups, experts]; number of slots taken, which are the first ones of each expert.
      capacity: capacity of each expert.
    """
    groups, experts = taken.shape
    number = tf.reshape(tf.range(capacity, dtype=taken.dtype), [1, capacity, 1])
    free = tf.cast(number >= tf.expand_dims(taken, 1), taken.dtype)  # [groups, capacity, experts]
    flat = tf.reshape(free, [-1 if groups is None else groups, capacity * experts])
    order = tf.cumsum(flat, axis=1, exclusive=True)
    turn = tf.cumsum(tokens, axis=1, exclusive=True)
    same = tf.cast(tf.equal(tf.expand_dims(turn, 2), tf.expand_dims(order, 1)), taken.dtype)
    found = same * tf.expand_dims(tokens, 2) * tf.expand_dims(flat, 1)  # [groups, tokens, capacity * experts]
    shaped = tf.reshape(found, [-1 if groups is None else groups, tokens.shape[1], capacity, experts])
    return tf.transpose(shaped, [0, 1, 3, 2])
