"""Programs, drawn or written down: lists of instructions, each of which adds tensors to those that later ones choose from.

An instruction is a name, three numbers i, j and k that choose its operands and a variant, and a program if it has a body. One
that does not fit its operands adds nothing: each list is a program. `programs.tsv` has the expressions of most.
"""

import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from hypothesis import strategies as st

from tests.row_semantics import operations
from tfdist.row_semantics.declarations import row_wise  # noqa: F401 (lines of written.tsv name it)

fits = operations.NAMES["fits"]
SPECS = (tf.TensorSpec((None, 3), tf.float64), tf.TensorSpec((None, 3), tf.float64), tf.TensorSpec((None,), tf.int32))
Instruction = tuple[str, int, int, int, list[Any]]

_LINES = pathlib.Path(__file__).with_suffix(".tsv").read_text(encoding="utf-8").splitlines()
_EXPRESSIONS = {name: compile(expression, name, "eval") for name, expression in (line.split("\t") for line in _LINES)}
_COUNTING = [line.split("\t")[0] for line in _LINES if re.search(r"\bn\b", line)]
_OFTEN = "unary binary binary reduce reduce count compare where cast slice cond loop gradient assign operation".split()
NAMES = [*_EXPRESSIONS, *_OFTEN, *_OFTEN]
_OTHERS = re.compile("Random|Multinomial|TruncatedNormal|BroadcastGradientArgs")  # are compared in part only
_CALLS = [call for kind, each in sorted(operations.calls().items()) if not _OTHERS.search(kind) for call in each]
_TYPES = {"f": tf.float64, "i": tf.int32, "b": tf.bool}


class Machine:
    """Runs instructions: has the tensors so far."""

    def __init__(self, tensors: Sequence[tf.Tensor], variables: Sequence[tf.Variable]):
        self.tensors, self.variables = list(tensors), variables

    def run(self, program: Sequence[Instruction]) -> tf.Tensor:
        """Returns the last tensor of floating-point numbers."""
        for name, *arguments in program:
            try:
                results = (
                    getattr(self, f"_{name}")(*arguments) if name not in _EXPRESSIONS else self._of(name, *arguments)
                )
            except Exception:  # it does not fit its operands
                continue
            self.tensors += [each for each in tf.nest.flatten([results]) if each is not None]
        return self.pick(0)

    def pick(self, number: int, dtype: tf.DType = tf.float64) -> tf.Tensor:
        """Returns a tensor: 0 is the newest, and large numbers are arguments."""
        fitting = [each for each in self.tensors if each.dtype == dtype]
        fitting = fitting if number <= 45 else fitting[:5][-2:]
        return fitting[-1 - number % len(fitting)]

    def apart(self, tensors: Sequence[tf.Tensor], program: Sequence[Instruction]) -> tf.Tensor:
        """Returns the result of a program on other tensors beside these."""
        return Machine([*self.tensors, *tensors], self.variables).run(program)

    def _of(self, name: str, i: int, j: int, k: int, body: Any) -> Any:
        x, y = self.pick(i), self.pick(k)
        known = {"self": self, "x": x, "y": y, "i": i, "j": j, "k": k, "body": body}
        if name in _COUNTING:
            known["n"] = tf.shape(y)[0] if y.shape.rank else tf.size(y)
        return eval(_EXPRESSIONS[name], {**globals(), **known})

    def _operation(self, i: int, j: int, k: int, body: Any) -> Any:
        letters, call = _CALLS[(61 * i + j) % len(_CALLS)]
        results = call(*[self.pick(k + number, _TYPES[each.lower()]) for number, each in enumerate(letters)])
        return [each for each in tf.nest.flatten(results) if each.dtype in (tf.float64, tf.int32, tf.bool)]

    def _cond(self, i: int, j: int, k: int, body: Any) -> Any:
        x = self.pick(i)
        condition = tf.reduce_any(self.pick(j, tf.bool)) if j % 3 else self.variables[1] > j % 2
        return tf.cond(condition, lambda: self.apart([x], body), lambda: self.apart([x], body[: len(body) // 2]))

    def _loop(self, i: int, j: int, k: int, body: Any) -> Any:
        x = self.pick(i)
        times = 2 if j % 3 else tf.minimum(tf.reduce_max(self.pick(k, tf.int32)), 3)

        def step(number: tf.Tensor, value: tf.Tensor) -> Any:
            return number + 1, self.apart([tf.cast(number, tf.float64), value], body)

        shapes = [tf.TensorShape([]), tf.TensorShape([None] * x.shape.rank)]
        return tf.while_loop(lambda number, _: number < times, step, [0, x], shapes)[1]

    def _gradient(self, i: int, j: int, k: int, body: Any) -> Any:
        x = self.pick(i) if k % 2 else self.variables[0]

        def function(x: tf.Tensor) -> tf.Tensor:
            result = self.apart([x + 0.0], body)
            return tf.reduce_mean(result) if j % 3 == 0 else tf.reduce_sum(result) if j % 3 == 1 else result

        return with_gradient(function, x)

    def _assign(self, i: int, j: int, k: int, body: Any) -> Any:
        x = self.pick(i)
        variable = next(each for each in self.variables if each.shape == x.shape)
        if j % 4 == 1:
            variable.assign_add(x)
        elif j % 4 == 3:
            variable.assign_sub(x)
        else:
            variable.assign(variable + x if j % 4 else x)
        return variable.read_value()


def with_gradient(function: Callable[[Any], tf.Tensor], x: tf.Tensor) -> list[tf.Tensor | None]:
    """Returns the result of a function and its gradient."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        result = function(x)
    gradient = tape.gradient(result, x)
    return [result, None if gradient is None else tf.convert_to_tensor(gradient)]


def axis(x: tf.Tensor, number: int) -> int | None:
    """Returns an axis of a tensor, or None for all."""
    return [*range(x.shape.rank), None][number % (x.shape.rank + 1)]


def function_of(program: Sequence[Instruction] | str) -> Callable[..., Any]:
    """Returns the function of a program, which may be an expression, for `oracle.Traced`."""
    values = ([0.5, -1.0, 2.0], 0.25, [[0.5, -1, 2], [1, 0, 0.25], [-2, 1, 1]])
    variables = [tf.Variable(each, dtype=tf.float64) for each in values]

    def function(x: tf.Tensor, y: tf.Tensor, labels: tf.Tensor) -> Any:
        if isinstance(program, str):
            vector, scalar, _ = variables
            return eval(program, {**globals(), "x": x, "y": y, "labels": labels, "v": vector, "s": scalar})
        return Machine([x > 0, labels, *(each.read_value() for each in variables), y, x], variables).run(program)

    return function


def _instructions(bodies: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    any_number, small = st.integers(0, 60), st.integers(0, 3)  # mostly one of the newest tensors
    return st.tuples(st.sampled_from(NAMES), small | any_number, any_number, small | any_number, bodies)


_BODIES = st.lists(_instructions(st.lists(_instructions(st.just([])), max_size=3)), max_size=5)
PROGRAMS = st.lists(_instructions(_BODIES), min_size=3, max_size=30)
