"""Programs, drawn or written down: lists of instructions, each of which adds tensors to those that later ones choose from.

An instruction is a name, three numbers that choose its operands and variants, and a program for what has a body. One that does
not fit its operands adds nothing, so that each list is a program.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from hypothesis import strategies as st

SPECS = (tf.TensorSpec((None, 3), tf.float64), tf.TensorSpec((None, 3), tf.float64), tf.TensorSpec((None,), tf.int32))
Instruction = tuple[str, int, int, int, list[Any]]

UNARY: Sequence[Callable[[Any], Any]] = (
    *(
        tf.tanh,
        tf.abs,
        tf.square,
        tf.nn.relu,
        tf.sigmoid,
        tf.sign,
        tf.negative,
        tf.stop_gradient,
        tf.zeros_like,
        tf.ones_like,
    ),
    *(tf.nn.softmax, tf.floor, lambda x: x / 2 + 1, lambda x: tf.math.log(1 + x * x), lambda x: 1 / (1 + x * x)),
    *(
        lambda x: 0.0 * x,
        lambda x: tf.clip_by_value(x, -1, 0.5),
        tf.nn.l2_loss,
        lambda x: tf.exp(-tf.abs(x)),
        tf.nn.elu,
    ),
    *(
        lambda x: tf.cumsum(x, -1),
        lambda x: tf.reverse(x, [0]),
        lambda x: tf.sort(x, -1),
        tf.identity,
        tf.nn.leaky_relu,
    ),
    *(lambda x: x - 1, lambda x: 1.5 * x, lambda x: tf.math.l2_normalize(x, -1, 1e-3), tf.math.softplus),
)
BINARY: Sequence[Callable[[Any, Any], Any]] = (
    *(tf.add, tf.add, tf.subtract, tf.multiply, tf.multiply, tf.maximum, tf.minimum, tf.math.divide_no_nan),
    *(lambda x, y: x / (1 + y * y), lambda x, y: tf.where(x > y, x, y / 2), lambda x, y: x / tf.maximum(y, 1)),
    *(tf.math.squared_difference, lambda x, y: tf.add_n([x, y])),
)
REDUCTIONS = (
    tf.reduce_sum,
    tf.reduce_mean,
    tf.reduce_max,
    tf.reduce_min,
    tf.reduce_prod,
    tf.reduce_sum,
    tf.reduce_mean,
)
NAMES = """
    unary unary binary binary binary reduce reduce reduce matmul reshape transpose expand squeeze
    stack concat tile pad slice slice gather one_hot segment scatter count count fill cast compare
    any where cond loop map gradient gradient assign assign read arg batch_gather einsum to_int
""".split()


class Machine:
    """Runs instructions: has the tensors so far."""

    def __init__(self, tensors: Sequence[tf.Tensor], variables: Sequence[tf.Variable]):
        self.tensors, self.variables = list(tensors), variables

    def run(self, program: Sequence[Instruction]) -> tf.Tensor:
        """Returns the last tensor of floating-point numbers."""
        for name, *arguments in program:
            try:
                results = getattr(self, f"_{name}")(*arguments)
            except Exception:  # it does not fit its operands
                continue
            self.tensors += [each for each in tf.nest.flatten([results]) if each is not None]
        return self.pick(0)

    def pick(self, number: int, dtype: tf.DType = tf.float64) -> tf.Tensor:
        """Returns a tensor: 0 is the newest."""
        fitting = [each for each in self.tensors if each.dtype == dtype]
        return fitting[-1 - number % len(fitting)]

    def apart(self, tensors: Sequence[tf.Tensor], program: Sequence[Instruction]) -> tf.Tensor:
        """Returns the result of a program on other tensors beside these."""
        return Machine([*self.tensors, *tensors], self.variables).run(program)

    def _unary(self, i: int, j: int, k: int, body: Any) -> Any:
        return UNARY[j % len(UNARY)](self.pick(i))

    def _binary(self, i: int, j: int, k: int, body: Any) -> Any:
        x, y = self.pick(i), self.pick(k)
        check_broadcast(x, y)
        return BINARY[j % len(BINARY)](x, y)

    def _reduce(self, i: int, j: int, k: int, body: Any) -> Any:
        x = self.pick(i)
        axis = k % (x.shape.rank + 1)
        return REDUCTIONS[j % len(REDUCTIONS)](x, None if axis == x.shape.rank else axis, keepdims=bool(j // 7 % 2))

    def _matmul(self, i: int, j: int, k: int, body: Any) -> Any:
        return tf.matmul(self.pick(i), self.pick(k), transpose_a=bool(j % 2), transpose_b=bool(j // 2 % 2))

    def _einsum(self, i: int, j: int, k: int, body: Any) -> Any:
        equations = ("ab,ac->bc", "ab,ab->a", "ab,cb->ac", "ab,ab->ba", "ab,ab->", "abc,ab->ac", "abc,c->ba")
        return tf.einsum(equations[j % len(equations)], self.pick(i), self.pick(k))

    def _reshape(self, i: int, j: int, k: int, body: Any) -> Any:
        x = self.pick(i)
        n = tf.shape(self.pick(k))[0]
        shapes = ([-1], [-1, 3], [3, -1], [1, -1], [-1, 1], [n, -1], [n, 3], [n, -1, 3], [-1, 2], [-1, 3, 1], [-1, n])
        return tf.reshape(x, shapes[j % len(shapes)])

    def _transpose(self, i: int, j: int, k: int, body: Any) -> Any:
        x = self.pick(i)
        order = list(range(x.shape.rank))
        return tf.transpose(x, order[j % len(order) :] + order[: j % len(order)])

    def _expand(self, i: int, j: int, k: int, body: Any) -> Any:
        x = self.pick(i)
        return tf.expand_dims(x, j % (x.shape.rank + 1)) if x.shape.rank < 4 else None

    def _squeeze(self, i: int, j: int, k: int, body: Any) -> Any:
        x = self.pick(i)
        ones = [axis for axis, dim in enumerate(x.shape) if dim == 1]
        return tf.squeeze(x, ones[j % len(ones)]) if ones else None

    def _stack(self, i: int, j: int, k: int, body: Any) -> Any:
        x, y = self.pick(i), self.pick(k)
        check_broadcast(x, y)
        return tf.stack([x, y], j % (x.shape.rank + 1))

    def _concat(self, i: int, j: int, k: int, body: Any) -> Any:
        x, y = self.pick(i), self.pick(k)
        if x.shape.as_list() != y.shape.as_list() and j % 3:
            return None
        return tf.concat([x, y], j % x.shape.rank)

    def _tile(self, i: int, j: int, k: int, body: Any) -> Any:
        x = self.pick(i)
        times = tf.shape(self.pick(k))[0] if k % 2 else 2
        return tf.tile(x, [times if axis == j % x.shape.rank else 1 for axis in range(x.shape.rank)])

    def _pad(self, i: int, j: int, k: int, body: Any) -> Any:
        x = self.pick(i)
        return tf.pad(
            x,
            [[k % 2, 1] if axis == j % x.shape.rank else [0, 0] for axis in range(x.shape.rank)],
            constant_values=k % 3,
        )

    def _slice(self, i: int, j: int, k: int, body: Any) -> Any:
        x = self.pick(i)
        n = tf.shape(self.pick(k))[0]
        slices: Sequence[Any] = (
            *(
                0,
                slice(1, None),
                slice(None, -1),
                slice(None, n),
                (..., 0),
                (..., slice(1, None)),
                (..., None),
                None,
                slice(1),
            ),
            *((slice(None), 0), (slice(None), slice(1, 2)), slice(None, None, -1), (slice(n), ..., slice(2)), (0, ...)),
            *(
                (slice(None), slice(n)),
                (..., slice(0, None)),
                slice(None, None, 2),
                (slice(None), None),
                slice(n - 1, None),
            ),
        )
        return x[slices[j % len(slices)]]

    def _gather(self, i: int, j: int, k: int, body: Any) -> Any:
        x = self.pick(i)
        return tf.gather(x, tf.clip_by_value(self.pick(k, tf.int32), 0, 0 if j % 3 else 2), axis=j % x.shape.rank)

    def _batch_gather(self, i: int, j: int, k: int, body: Any) -> Any:
        return tf.gather(
            self.pick(i), tf.clip_by_value(self.pick(k, tf.int32), 0, 0 if j % 2 else 2), axis=1, batch_dims=1
        )

    def _one_hot(self, i: int, j: int, k: int, body: Any) -> Any:
        return tf.one_hot(self.pick(i, tf.int32), 3, dtype=tf.float64, axis=-(j % 2))

    def _segment(self, i: int, j: int, k: int, body: Any) -> Any:
        return tf.math.unsorted_segment_sum(self.pick(i), self.pick(k, tf.int32) % 3, 3)

    def _scatter(self, i: int, j: int, k: int, body: Any) -> Any:
        updates, indices = self.pick(i), self.pick(k, tf.int32)[..., None] % 3
        if j % 2:
            return tf.scatter_nd(indices, updates, [3, *updates.shape[indices.shape.rank - 1 :]])
        return tf.tensor_scatter_nd_add(self.pick(j), indices, updates)

    def _count(self, i: int, j: int, k: int, body: Any) -> Any:
        x = self.pick(i)
        count = tf.size(x) if j % 2 else tf.shape(x)[k % x.shape.rank]
        return [count, tf.cast(count, tf.float64)]

    def _fill(self, i: int, j: int, k: int, body: Any) -> Any:
        x, y = self.pick(i), self.pick(k)
        if j % 3 == 0:
            return tf.broadcast_to(y, tf.shape(x))
        return tf.fill(tf.shape(x), y) if j % 3 == 1 else tf.ones(tf.shape(x), tf.float64)

    def _cast(self, i: int, j: int, k: int, body: Any) -> Any:
        return tf.cast(self.pick(i, tf.bool if j % 2 else tf.int32), tf.float64)

    def _to_int(self, i: int, j: int, k: int, body: Any) -> Any:
        return tf.cast(tf.clip_by_value(self.pick(i) * (1 + j % 2), -9, 9), tf.int32)

    def _compare(self, i: int, j: int, k: int, body: Any) -> Any:
        x, y = self.pick(i), self.pick(k)
        check_broadcast(x, y)
        return (tf.greater, tf.less_equal, tf.equal, tf.not_equal)[j % 4](x, y if j % 3 else tf.zeros([], tf.float64))

    def _any(self, i: int, j: int, k: int, body: Any) -> Any:
        x = self.pick(i, tf.bool)
        axis = k % (x.shape.rank + 1)
        return (tf.reduce_any, tf.reduce_all)[j % 2](x, None if axis == x.shape.rank else axis)

    def _where(self, i: int, j: int, k: int, body: Any) -> Any:
        condition, x, y = self.pick(j, tf.bool), self.pick(i), self.pick(k)
        check_broadcast(condition, x, y)
        return tf.where(condition, x, y)

    def _arg(self, i: int, j: int, k: int, body: Any) -> Any:
        x = self.pick(i)
        return (tf.argmax, tf.argmin)[j % 2](x, k % x.shape.rank, output_type=tf.int32)

    def _cond(self, i: int, j: int, k: int, body: Any) -> Any:
        x = self.pick(i)
        condition = tf.reduce_any(self.pick(j, tf.bool)) if j % 3 else tf.cast(self.variables[1] > 0, tf.bool)
        return tf.cond(condition, lambda: self.apart([x], body), lambda: self.apart([x], body[: len(body) // 2]))

    def _loop(self, i: int, j: int, k: int, body: Any) -> Any:
        x = self.pick(i)
        times = 2 if j % 3 else tf.minimum(tf.reduce_max(self.pick(k, tf.int32)), 3)

        def step(number: tf.Tensor, value: tf.Tensor) -> Any:
            return number + 1, self.apart([tf.cast(number, tf.float64), value], body)

        shapes = [tf.TensorShape([]), tf.TensorShape([None] * x.shape.rank)]
        return tf.while_loop(lambda number, _: number < times, step, [0, x], shapes)[1]

    def _map(self, i: int, j: int, k: int, body: Any) -> Any:
        x = self.pick(i)
        x = tf.transpose(x) if j % 2 else x
        return tf.map_fn(lambda row: self.apart([row], body[:2]), x, fn_output_signature=tf.float64) + tf.zeros(
            [], tf.float64
        )

    def _gradient(self, i: int, j: int, k: int, body: Any) -> Any:
        x = self.pick(i) if k % 2 else self.variables[0]
        with tf.GradientTape() as tape:
            tape.watch(x)
            result = self.apart([x + 0.0], body)
            result = tf.reduce_mean(result) if j % 3 == 0 else tf.reduce_sum(result) if j % 3 == 1 else result
        gradient = tape.gradient(result, x)
        return [result, None if gradient is None else tf.convert_to_tensor(gradient)]

    def _assign(self, i: int, j: int, k: int, body: Any) -> Any:
        x = self.pick(i)
        variable = next((each for each in self.variables if each.shape == x.shape), None)
        if variable is None:
            return None
        if j % 4 == 0:
            variable.assign(x)
        elif j % 4 == 1:
            variable.assign_add(x)
        elif j % 4 == 2:
            variable.assign(variable + x)
        else:
            variable.assign_sub(x)
        return variable.read_value()

    def _read(self, i: int, j: int, k: int, body: Any) -> Any:
        return self.variables[j % len(self.variables)].read_value()


def check_broadcast(*tensors: tf.Tensor) -> None:
    """Raises `ValueError` where a known dim stands beside one that is not."""
    rank = max(each.shape.rank for each in tensors)
    shapes = [[1] * (rank - each.shape.rank) + each.shape.as_list() for each in tensors]
    if any(len(set(dims) - {1}) > 1 for dims in zip(*shapes, strict=True)):
        raise ValueError


def function_of(program: Sequence[Instruction]) -> Callable[..., Any]:
    """Returns the function of a program, for `oracle.Traced`."""
    values = ([0.5, -1.0, 2.0], 0.25, [[0.5, -1, 2], [1, 0, 0.25], [-2, 1, 1]])
    variables = [tf.Variable(each, dtype=tf.float64) for each in values]

    def function(x: tf.Tensor, y: tf.Tensor, labels: tf.Tensor) -> Any:
        return Machine([x > 0, labels, *(each.read_value() for each in variables), y, x], variables).run(program)

    return function


_NUMBERS = st.integers(0, 60)


def _instructions(bodies: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    small = st.integers(0, 3)  # mostly one of the newest tensors
    return st.tuples(st.sampled_from(NAMES), small | _NUMBERS, _NUMBERS, small | _NUMBERS, bodies)


_BODIES = st.lists(_instructions(st.lists(_instructions(st.just([])), max_size=3)), max_size=5)
PROGRAMS = st.lists(_instructions(_BODIES), min_size=3, max_size=30)
