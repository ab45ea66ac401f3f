"""Checks on some examples that losses of a user are means over rows, as replicas that compute the loss of their rows require.

A function that returns one number for a batch, or what a layer adds by `add_loss`, may as well be a sum, or depend on all rows
together: that cannot be read from the code. So the losses of a few rows are compared with those of two parts of them.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import OneReplica, using
from tfdist.pipelining.staged_model import StagedModel
from tfdist.step import loss
from tfdist.step.tolerance import Tolerance

_ROWS = 8
_OF_GIVEN_OUTPUTS = Tolerance(relative=1e-4, rounding=0.0)
_NOT_FOR_SOME_ROWS = (ValueError, TypeError, IndexError, tf.errors.InvalidArgumentError)


class _Call(NamedTuple):
    """What a call of the model returns and adds.

    Attributes:
      outputs: the outputs, or None for a model that this process cannot call.
      added: losses by the layer that has added them, times the number of rows, as numbers that add up over rows.
    """

    outputs: Any
    added: dict[str, list[np.ndarray]]


def losses_of_all_rows(model: keras.Model, examples: Any, *, may_be_called: bool) -> list[str]:
    """Returns the names of the losses that are not means over rows; of losses that are not Keras's own.

    Runs on this process alone, and changes no variable of Keras.

    Args:
      model: compiled and built model.
      examples: structure (x, y) or (x, y, sample_weight) of arrays [rows, ...].
      may_be_called: whether this process has the whole model, without layouts. Otherwise compiled losses are compared for
        random outputs, and what layers add is not compared.
    """
    compiled = [
        loss.name for _, loss, _ in keras_internals.flat_losses(model) if not keras_internals.loss_form(loss)[0]
    ]
    layers = [model, *keras_internals.layers_of(model)] if may_be_called else []
    rows = min(_ROWS, *(len(leaf) for leaf in keras.tree.flatten(examples)))
    if rows < 2 or not (compiled or any(map(keras_internals.is_own, layers))):
        return []
    # Parts of different sizes, since a mean of equal ones may hide what a root or a maximum makes of them.
    borders = sorted({0, 1, rows // 3, rows})
    parts = [slice(begin, end) for begin, end in itertools.pairwise(borders)]
    examples = keras.tree.map_structure(lambda leaf: tf.convert_to_tensor(leaf[:rows]), examples)
    try:
        whole = (
            _called(model, examples[0], slice(0, rows)) if may_be_called else _Call(_random_outputs(model, rows), {})
        )
        wrong = _compiled(model, examples, whole.outputs, [slice(0, rows), slice(0, rows), *parts], compiled)
        return wrong + (_added(model, examples[0], whole, [slice(0, rows), *parts]) if whole.added else [])
    except _NOT_FOR_SOME_ROWS:
        return []  # the code needs a certain number of rows, which a step has, or which it reports


def _compiled(
    model: keras.Model, examples: Any, outputs: Any, parts: Sequence[slice], names: Sequence[str]
) -> list[str]:
    """Returns which of the compiled losses do not add up, for given outputs."""
    found: dict[str, list[list[np.ndarray]]] = {name: [] for name in names}
    for part in parts:
        own = keras.tree.map_structure(lambda leaf, part=part: leaf[part], (examples, outputs))
        _, y, weight = keras.utils.unpack_x_y_sample_weight(own[0])
        with using(OneReplica()), keras_internals.neutral(part.start):
            terms = loss.terms(model, y, own[1], weight)
        for flat, term in zip(keras_internals.flat_losses(model), terms, strict=True):
            if flat.loss.name in found:
                found[flat.loss.name].append([np.asarray(term.numerator), np.asarray(term.denominator)])
    return [name for name, values in found.items() if not _add_up(values, _OF_GIVEN_OUTPUTS)]


def _added(model: keras.Model, x: Any, whole: _Call, parts: Sequence[slice]) -> list[str]:
    """Returns which layers add losses that do not add up, if the outputs for a row do not depend on the other rows."""
    tolerance = Tolerance.of(model)
    again, *of_parts = (_called(model, keras.tree.map_structure(lambda leaf, p=p: leaf[p], x), p) for p in parts)
    outputs = zip(*(keras.tree.flatten(each.outputs) for each in of_parts), strict=True)
    if not tolerance.holds([np.concatenate(each) for each in outputs], keras.tree.flatten(whole.outputs)):
        return []
    calls = [whole, again, *of_parts]
    names = [name for name in whole.added if all(name in call.added for call in calls)]
    return [f"what {name} adds" for name in names if not _add_up([call.added[name] for call in calls], tolerance)]


def _called(model: keras.Model, x: Any, rows: slice) -> _Call:
    with using(OneReplica()), keras_internals.neutral(rows.start), keras.StatelessScope(collect_losses=True):
        outputs = model(x, training=False)
        count = rows.stop - rows.start
        added = keras_internals.losses_by_layer(model)
    values = {name: [np.asarray(tf.reduce_sum(each)) * count for each in losses] for name, losses in added.items()}
    return _Call(keras.tree.map_structure(np.asarray, outputs), values)


def _random_outputs(model: keras.Model, rows: int) -> list[np.ndarray]:
    """Returns outputs that are probabilities along their last dim."""
    whole = model.whole if isinstance(model, StagedModel) else model
    found = []
    for output in getattr(whole, "outputs", None) or []:
        values = np.random.default_rng(0).uniform(0.05, 1.0, [rows, *output.shape[1:]])
        found.append((values / values.sum(axis=-1, keepdims=True)).astype(output.dtype))
    return found


def _add_up(found: Sequence[list[np.ndarray]], tolerance: Tolerance) -> bool:
    """Returns whether values of all rows are the sums of those of parts, as far as they are finite and repeatable.

    Args:
      found: values of all rows, of all rows again, and of each part.
      tolerance: tolerance of sums.
    """
    whole, again, *parts = found
    if not all(np.array_equal(a, b) and np.all(np.isfinite(a)) for a, b in zip(whole, again, strict=True)):
        return True
    sums = [np.sum(each, axis=0) for each in zip(*parts, strict=True)]
    return all(tolerance.holds([ours], [theirs]) for ours, theirs in zip(sums, whole, strict=True))
