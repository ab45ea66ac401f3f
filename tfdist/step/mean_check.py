"""Checks on some examples that losses of a user are means over rows, as replicas that compute the loss of their rows require.

A function that returns one number for a batch, or what a layer adds by `add_loss`, may as well be a sum, or depend on all rows
together: that cannot be read from the code. So the losses of a few rows are compared with those of parts of them.
"""

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import OneReplica, using
from tfdist.distribution.strategy import Strategy
from tfdist.pipelining.staged_model import StagedModel
from tfdist.step import loss
from tfdist.step.tolerance import Tolerance

_ROWS = 8
_log = logging.getLogger(__name__)


class _Call(NamedTuple):
    """What a call of the model returns and adds.

    Attributes:
      outputs: the outputs, as arrays.
      added: for each layer that has added losses, these times the number of rows: numbers that add up over rows.
    """

    outputs: Any
    added: dict[str, list[np.ndarray]]


def losses_that_are_no_means(
    strategy: Strategy, model: keras.Model, examples: Any, *, may_be_called: bool
) -> list[str]:
    """Returns the names of a user's own losses that are not means over rows.

    Every process must call it. No communication takes place, and variables have the same values afterwards.

    Args:
      strategy: strategy of the model.
      model: compiled and built model.
      examples: structure (x, y) or (x, y, sample_weight) of arrays [rows, ...].
      may_be_called: whether replicas have the whole model, without layouts. Otherwise compiled losses are compared for
        random outputs, and what layers add is not compared.
    """
    flat = keras_internals.flat_losses(model)
    compiled = [number for number, (_, of_one, _) in enumerate(flat) if not keras_internals.loss_form(of_one)[0]]
    layers = [model, *keras_internals.layers_of(model)] if may_be_called else []
    rows = min(_ROWS, *(len(leaf) for leaf in keras.tree.flatten(examples)))
    if rows < 2 or not (compiled or any(map(keras_internals.is_own, layers))):
        return []
    # Parts of different sizes, since a mean of equal ones may hide what a root or a maximum makes of them.
    parts = [slice(0, rows), *itertools.starmap(slice, itertools.pairwise(sorted({0, 1, rows // 3, rows})))]
    x, *others = keras.tree.map_structure(lambda leaf: tf.convert_to_tensor(leaf[:rows]), tuple(examples))
    try:
        call = _forward(strategy, model, x) if may_be_called else None
        whole = call(parts[0]) if call else _Call(_random_outputs(model, rows), {})
        wrong = _compiled(strategy if may_be_called else None, model, others, whole.outputs, parts)
        found = [flat[number].loss.name for number in compiled if number in wrong]
        return found + (_added(model, call, whole, parts) if call and whole.added else [])
    except Exception:  # for example, code for a certain number of rows: a step has it, or reports the error
        _log.debug("Losses could not be compared:", exc_info=True)
        return []


def _forward(strategy: Strategy, model: keras.Model, x: Any) -> Callable[[slice], _Call]:
    """Returns a function that calls the model on a part of the rows `x`."""
    names: list[str] = []

    def forward(first_row: tf.Tensor, rows: Any) -> Any:
        with using(OneReplica()), keras_internals.neutral(first_row), keras_internals.functions_inlined():
            outputs = model(rows, training=False)
            added = keras_internals.losses_by_layer(model)
        names[:] = [name for name, losses in added.items() for _ in losses]
        return outputs, [tf.reduce_sum(each) for losses in added.values() for each in losses]

    compute = _computing(forward, x, strategy)

    def call(part: slice) -> _Call:
        outputs, losses = compute(x, part)
        added: dict[str, list[np.ndarray]] = {}
        for name, value in zip(names, losses, strict=True):
            added.setdefault(name, []).append(value * (part.stop - part.start))
        return _Call(outputs, added)

    return call


def _compiled(
    strategy: Strategy | None, model: keras.Model, others: list[Any], outputs: Any, parts: Sequence[slice]
) -> list[int]:
    """Returns the numbers of the compiled losses that do not add up, for given outputs."""

    def numbers(first_row: tf.Tensor, rows: Any) -> Any:
        (y, *weights), of_model = rows
        with using(OneReplica()), keras_internals.neutral(first_row), keras_internals.functions_inlined():
            terms = loss.terms(model, y, of_model, weights[0] if weights else None)
        return [[term.numerator, term.denominator] for term in terms]

    given = (tuple(others), keras.tree.map_structure(tf.convert_to_tensor, outputs))
    compute = _computing(numbers, given, strategy)
    found = [compute(given, part) for part in (parts[0], *parts)]
    precise = Tolerance(relative=1e-3, rounding=0.0)
    kinds = [each.dtype for of_one in found[0] for each in of_one]
    tolerance = precise if all(kind in (np.float32, np.float64) for kind in kinds) else Tolerance.of(model)
    return [number for number, of_one in enumerate(zip(*found, strict=True)) if not _add_up(of_one, tolerance)]


def _added(model: keras.Model, call: Callable[[slice], _Call], whole: _Call, parts: Sequence[slice]) -> list[str]:
    """Returns which layers add losses that do not add up, if the outputs for a row do not depend on the other rows."""
    tolerance = Tolerance.of(model)
    again, *of_parts = map(call, parts)
    outputs = zip(*(keras.tree.flatten(each.outputs) for each in of_parts), strict=True)
    if not tolerance.holds([np.concatenate(each) for each in outputs], keras.tree.flatten(whole.outputs)):
        return []
    calls = [whole, again, *of_parts]
    return [f"what {name} adds" for name in whole.added if not _add_up([c.added[name] for c in calls], tolerance)]


def _computing(function: Callable[..., Any], rows: Any, strategy: Strategy | None) -> Callable[[Any, slice], Any]:
    """Returns a call that computes a function of a part of rows, as arrays, on the first replica of this process.

    It is traced once, for any number of rows, as a step is, and every variable that it assigns is restored.

    Args:
      function: takes the number of the first row and the rows.
      rows: structure of tensors.
      strategy: on whose replicas the function runs; None to run it outside of replicas.
    """
    spec = keras.tree.map_structure(lambda leaf: tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype), rows)
    run = strategy.run if strategy else lambda called, *given: called(*given)
    signature = [tf.TensorSpec([], tf.int64), spec]
    traced = tf.function(lambda *given: run(function, *given), signature, autograph=False)

    def compute(given: Any, part: slice) -> Any:
        own = keras.tree.map_structure(lambda leaf: leaf[part], given)
        with keras_internals.variables_restored(traced.get_concrete_function()):
            found = traced(tf.constant(part.start, tf.int64), own)
        return tf.nest.map_structure(lambda leaf: np.asarray(strategy.local(leaf)[0] if strategy else leaf), found)

    return compute


def _random_outputs(model: keras.Model, rows: int) -> list[np.ndarray]:
    """Returns outputs that are probabilities along their last dim."""
    whole = model.whole if isinstance(model, StagedModel) else model
    found = []
    for output in whole.outputs:
        values = np.random.default_rng(0).uniform(0.05, 1.0, [rows, *output.shape[1:]])
        found.append((values / values.sum(axis=-1, keepdims=True)).astype(output.dtype))
    return found


def _add_up(found: Sequence[list[np.ndarray]], tolerance: Tolerance) -> bool:
    """Returns whether values of all rows are the sums of those of parts, as far as they are finite and repeatable.

    Args:
      found: values of all rows, of all rows again, and of each part.
      tolerance: tolerance of sums, relative to the largest of them: terms of different signs may cancel.
    """
    whole, again, *parts = found
    if not all(np.array_equal(a, b) and np.all(np.isfinite(a)) for a, b in zip(whole, again, strict=True)):
        return True
    sums = [np.sum(each, axis=0, dtype=np.float64) for each in zip(*parts, strict=True)]
    scales = [np.sum(np.abs(each), axis=0, dtype=np.float64) for each in zip(*parts, strict=True)]
    return all(
        abs(ours - theirs) <= tolerance.relative * max(abs(theirs), scale) + 1e-12
        for ours, theirs, scale in zip(sums, whole, scales, strict=True)
    )
