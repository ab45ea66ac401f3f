"""Accesses internals of Keras's layers: calls, tensor attributes, random numbers of user code, and embedding tables."""

import contextlib
import contextvars
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend import get_keras_mask, set_keras_mask
from keras.src.backend.common import global_state, remat
from keras.src.backend.common import variables as keras_variables
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from keras.src.backend.tensorflow import numpy as keras_numpy
from keras.src.backend.tensorflow import random as keras_random
from keras.src.initializers import random_initializers
from tensorflow.python.distribute import mirrored_run
from tensorflow.python.ops import random_ops_util

from tfdist.keras_internals.patching import Context, context_value, patched


def path_of(layer: keras.Layer) -> str:
    """Returns a layer's path, or its name if it has no path because it has no weights."""
    return layer.path or layer.name


def copy_mask_and_logits(tensor: tf.Tensor, other: tf.Tensor, lay_out: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    """Copies the mask and logits of `other` to `tensor` after applying `lay_out` to them; returns `tensor`."""
    mask, logits = mask_and_logits(other)
    set_mask_and_logits(tensor, None if mask is None else lay_out(mask), None if logits is None else lay_out(logits))
    return tensor


def mask_and_logits(tensor: Any) -> tuple[tf.Tensor | None, tf.Tensor | None]:
    """Returns the mask of a tensor and, for probabilities, the logits, which Keras's losses use."""
    logits = getattr(tensor, "_keras_logits", None)
    if logits is None and tf.is_symbolic_tensor(tensor) and tensor.op.type in ("Softmax", "Sigmoid"):
        [logits] = tensor.op.inputs
    return get_keras_mask(tensor), logits


def set_mask_and_logits(tensor: Any, mask: tf.Tensor | None, logits: tf.Tensor | None) -> None:
    """Attaches a mask and logits to a tensor."""
    if mask is not None:
        set_keras_mask(tensor, mask)
    if logits is not None:
        tensor._keras_logits = logits


def capture_call_context(layer: keras.Layer) -> Callable[[], contextlib.AbstractContextManager]:
    """Captures the context of a layer's `call`, such as dtype and training; the returned function restores it."""
    context, dtype = global_state.get_global_attribute("current_call_ctx"), layer.compute_dtype

    @contextlib.contextmanager
    def restore_context() -> Iterator[None]:
        outer_context = global_state.get_global_attribute("current_call_ctx")
        global_state.set_global_attribute("current_call_ctx", context)
        try:
            with keras_variables.AutocastScope(dtype if layer.autocast else None):
                yield
        finally:
            global_state.set_global_attribute("current_call_ctx", outer_context)

    return restore_context


def wrap_call(layer: keras.Layer, wrap: Callable[[keras.Layer, Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces a layer's `call` with `wrap(layer, layer.call)`, using Keras's own mechanism for rematerialization."""
    layer._remat_mode = remat.RematMode("full", 0, [])
    layer.rematerialized_call = lambda call, *_, **__: wrap(layer, call)


def layers_adding_losses(layer: keras.Layer, losses: Sequence[Any]) -> list[keras.Layer]:
    """Returns, for each loss of a stateless scope, the sublayer of `layer` that added it."""
    layers = list(layer._flatten_layers())
    return [next((sublayer for sublayer in layers if id(loss) in sublayer._loss_ids), layer) for loss in losses]


@functools.cache
def keep_losses_by_replica() -> None:
    """Stores the losses of layers separately for each replica of this process; further calls have no effect.

    Each replica has a thread. Without this, while a replica communicates in its forward pass, another replica could change
    its losses.
    """
    for name, make in (("_losses", list), ("_loss_ids", set)):
        setattr(keras.Layer, name, _replica_property(name, make))


def _replica_property(name: str, make: Callable[[], Any]) -> property:
    def attribute(layer: keras.Layer) -> tuple[dict[Any, Any], Any]:
        thread = threading.current_thread()
        if isinstance(thread, mirrored_run._MirroredReplicaThread):
            return thread.__dict__.setdefault(name, {}), id(layer)
        return layer.__dict__, name

    def value(layer: keras.Layer) -> Any:
        attributes, key = attribute(layer)
        return attributes.setdefault(key, make())

    def set_value(layer: keras.Layer, value: Any) -> None:
        attributes, key = attribute(layer)
        attributes[key] = value

    return property(value, set_value)


is_symbolic_call = in_symbolic_scope  # returns whether Keras runs layers only to infer shapes and dtypes of results


def check_layer_calls(check: Callable[[keras.Layer, Sequence[Any]], None]) -> None:
    """Makes every outermost call of a layer in this process call `check` first, unless the call is symbolic."""
    original = keras.Layer.__call__

    @functools.wraps(original)
    def checked_call(layer: keras.Layer, *args: Any, **kwargs: Any) -> Any:
        if global_state.get_global_attribute("current_call_ctx") is None and not in_symbolic_scope():
            inputs = keras.tree.flatten((args, kwargs))
            if not any(isinstance(x, keras.KerasTensor) for x in inputs):
                check(layer, inputs)
        return original(layer, *args, **kwargs)

    keras.Layer.__call__ = checked_call


def lay_out_attention(
    replace_query: Callable[[str, Any], Any],
    replace_projections: Callable[[str, Any, Any, Any, bool], tuple[Any, Any, Any, Any]],
    replace_output: Callable[[str, Any], Any],
) -> Context:
    """Context in which inputs, inner tensors and outputs of Keras's attention layers are replaced to lay them out.

    The functions take a layer's path. `replace_query` replaces the query, [batch, sequence, embed], also as key or value.
    `replace_projections` takes query, key and value after the projections, [batch, sequence, heads, head_dim], and whether
    there is only a causal mask; it returns their replacements and the mask, [1, queries, keys] bool, or None for Keras's own
    mask. It is not called in subclasses that override `_compute_attention`.
    """

    def wrap_attention(method: Callable[..., Any]) -> Callable[..., Any]:
        def attend(
            layer: keras.Layer, query: Any, key: Any, value: Any, attention_mask: Any = None, *args: Any, **kwargs: Any
        ) -> Any:
            causal = kwargs.pop("use_causal_mask", False)
            query, key, value, mask = replace_projections(layer.path, query, key, value, causal)
            if causal and mask is None:
                kwargs["use_causal_mask"] = True
            return method(layer, query, key, value, attention_mask if mask is None else mask, *args, **kwargs)

        return attend

    def wrap_layer_call(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(layer: keras.Layer, *args: Any, **kwargs: Any) -> Any:
            query = args[0] if args else kwargs["query"]
            if tf.is_tensor(query):
                new_query = replace_query(layer.path, query)
                args = tuple(new_query if x is query else x for x in args)
                kwargs = {name: new_query if x is query else x for name, x in kwargs.items()}
            outputs = method(layer, *args, **kwargs)
            if isinstance(outputs, tuple):  # the second element is the scores
                return (replace_output(layer.path, outputs[0]), *outputs[1:])
            return copy_mask_and_logits(replace_output(layer.path, outputs), outputs, tf.identity)

        return call

    kinds = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)
    wrappers = {"_compute_attention": wrap_attention, "call": wrap_layer_call}
    return patched(*((k, name, wrap(getattr(k, name))) for k in kinds for name, wrap in wrappers.items()))


def keep_product_dims() -> Context:
    """Context in which Keras does not merge dims to compute products, because DTensor would gather a sharded dim.

    Without this, Keras's `einsum` becomes one matrix product per row of a batch, and the gradient of a weight is communicated
    for each row before the sum over rows.
    """
    matmul, einsum = keras_numpy.matmul, keras_numpy.einsum

    def product(x1: Any, x2: Any) -> Any:
        if not (tf.is_tensor(x1) and 2 < (x1.shape.rank or 0) < 9 and len(x2.shape) == 2):
            return matmul(x1, x2)
        dtype = keras.backend.result_type(x1.dtype, x2.dtype)
        letters = "abcdefgh"[: x1.shape.rank - 1]
        return tf.einsum(f"{letters}n,nm->{letters}m", tf.cast(x1, dtype), tf.cast(x2, dtype))

    def general_einsum(subscripts: str, *operands: Any, **kwargs: Any) -> Any:
        values = [tf.convert_to_tensor(x) for x in operands]
        dtypes = {x.dtype for x in values}
        is_plain = len(dtypes) == 1 and dtypes.pop().is_floating and "." not in subscripts
        return (tf.einsum if is_plain else einsum)(subscripts, *values, **kwargs)

    return patched((keras_numpy, "matmul", product), (keras_numpy, "einsum", general_einsum))


# Random numbers that user code draws in a replica function with `keras.random` or `tf.random`. TensorFlow seeds an operation by
# its graph, so processes with the same seed would draw the same numbers. Replicas would share Keras's generators
# outside of a model, which are variables. Inside `random_key_scope`, each replica draws different numbers.

# Functions that use the graph's seed; arguments that their stateless equivalents also have are passed by name.
_STATEFUL = ("normal", "uniform", "truncated_normal", "categorical", "gamma", "poisson")
_DRAW_FUNCTIONS = (*_STATEFUL, *(f"stateless_{name}" for name in (*_STATEFUL, "binomial")), "shuffle")


_source: contextvars.ContextVar["_KeyedSource | None"] = contextvars.ContextVar("random numbers", default=None)


def random_key_scope(key: tf.Tensor, seeded_ids: frozenset[int]) -> Context:
    """Context in which random numbers depend only on a key, [2] int32, and on the number of preceding draws.

    Generators whose states have `seeded_ids` are already seeded per replica.
    """
    _install_wrappers()
    return context_value(_source, _KeyedSource(key, seeded_ids))


class _KeyedSource:
    def __init__(self, key: tf.Tensor, seeded: frozenset[int]):
        self._key, self._seeded_ids, self._draws = key, seeded, 0

    def draw(self, name: str, original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        if name == "shuffle":
            return tf.random.experimental.stateless_shuffle(arguments["value"], seed=self._next())
        if name == "dropout":
            options = {key: arguments[key] for key in ("x", "rate", "noise_shape") if arguments.get(key) is not None}
            return tf.nn.experimental.stateless_dropout(**options, seed=self._next())
        if name not in _STATEFUL:
            return original(**arguments)
        stateless = getattr(tf.random, f"stateless_{name}")
        common = inspect.signature(stateless).parameters.keys() & arguments.keys()
        return stateless(**{key: arguments[key] for key in common if key != "seed"}, seed=self._next())

    def seed(self, original: Callable[..., Any], seed: Any) -> tf.Tensor:
        if isinstance(seed, keras.random.SeedGenerator) and id(seed.state) in self._seeded_ids:
            return original(seed)
        return self._next()

    def _next(self) -> tf.Tensor:
        self._draws += 1
        return tf.random.experimental.stateless_fold_in(self._key, self._draws)


@functools.cache
def _install_wrappers() -> None:
    """Wraps the functions that draw random numbers, once per process; wrappers act only inside `random_key_scope`."""
    for name in _DRAW_FUNCTIONS:
        if getattr(getattr(tf.random, name), "__module__", "").startswith("tensorflow"):  # not replaced by the program
            setattr(tf.random, name, _wrap_draw(name, getattr(tf.random, name)))
    tf.nn.dropout = _wrap_draw("dropout", tf.nn.dropout)
    original = keras_random.draw_seed

    def draw_seed(seed: Any) -> tf.Tensor:
        source = _source.get()
        return original(seed) if source is None else source.seed(original, seed)

    keras_random.draw_seed = draw_seed


def _wrap_draw(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        source = _source.get()
        if source is None:
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return source.draw(name, original, dict(bound.arguments))

    return function


_UNIFORM_OR_NORMAL = (keras.initializers.RandomUniform, keras.initializers.RandomNormal)
_TRUNCATED = (keras.initializers.TruncatedNormal,)
_SCALED = (
    keras.initializers.VarianceScaling,
    *(getattr(keras.initializers, f"{a}{b}") for a in ("Glorot", "He", "Lecun") for b in ("Uniform", "Normal")),
)
_CONSTANT = (keras.initializers.Zeros, keras.initializers.Ones, keras.initializers.Constant)
_GROUP_SIZES = {tf.float32: 4, tf.float64: 2}  # count of random numbers from one value of the generator's counter
_RESERVED = 64  # counter values reserved for each random number if some draws are rejected


def is_only_looked_up(layer: keras.Layer) -> bool:
    """Returns whether a layer is a trainable `keras.layers.Embedding` whose table is read only by its lookup."""
    return (
        type(layer) is keras.layers.Embedding
        and layer.trainable
        and layer.embeddings_regularizer is None
        and layer.embeddings_constraint is None
        and not layer.lora_rank
        and layer.quantization_mode is None
    )


def set_lookup(layer: keras.layers.Embedding, lookup: Callable[[Any], tf.Tensor]) -> None:
    """Makes an embedding layer call `lookup` with ids instead of reading its table."""
    layer.__dict__["call"] = lookup  # bypasses Keras's tracking


def rows_initializer(variable: keras.Variable) -> Mapping[str, Any] | None:
    """Returns the `initializer` argument of `initial_rows`, for JSON; None if it cannot draw the rows separately."""
    initializer = variable._initializer
    kinds = (*_UNIFORM_OR_NORMAL, *_TRUNCATED, *_SCALED, *_CONSTANT)
    if type(initializer) not in kinds or tf.as_dtype(variable.dtype) not in _GROUP_SIZES:
        return None
    config = initializer.get_config()
    if not isinstance(initializer, _CONSTANT):
        if not isinstance(initializer.seed, int):
            return None
        config["seed"] = initializer.seed  # Keras draws a seed if none is given, but does not serialize it
    elif not isinstance(config.get("value", 0), int | float):
        return None
    return keras.initializers.serialize(type(initializer).from_config(config))


def initial_rows(
    initializer: Mapping[str, Any], shape: tuple[int, int], dtype: str, begin: int, end: int
) -> np.ndarray:
    """Returns rows [begin, end) of the values that an initializer draws for a whole variable, bit for bit.

    The generator is a function of a seed and a counter, which each group of values increases by a constant. `initializer` is
    a result of `rows_initializer`, and `begin` a multiple of 4.
    """
    draw = keras.initializers.deserialize(initializer)
    group_size = _GROUP_SIZES[tf.as_dtype(dtype)]
    rejects = isinstance(draw, _TRUNCATED) or getattr(draw, "distribution", "") == "truncated_normal"
    skipped_count = begin * shape[1] // group_size * (group_size * _RESERVED if rejects else 1)
    compute_fans = random_initializers.compute_fans

    def fans_of_all_rows(_: Any, *axes: Any, **named_axes: Any) -> Any:
        return compute_fans(shape, *axes, **named_axes)

    with _advance_counter(skipped_count), patched((random_initializers, "compute_fans", fans_of_all_rows)):
        return np.asarray(draw((end - begin, shape[1]), dtype=dtype))


@contextlib.contextmanager
def _advance_counter(increment: int) -> Iterator[None]:
    """Context in which eager stateless random operations start at a later value of their 128-bit counter."""
    original = random_ops_util.get_key_counter_alg

    @functools.wraps(original)
    def get_advanced_counter(seed: Any, alg: Any) -> Any:
        key, counter, algorithm = original(seed, alg)
        low, high = (int(part) for part in counter.numpy())
        value = (low + (high << 64) + increment) % (1 << 128)
        return key, tf.constant([value & (1 << 64) - 1, value >> 64], tf.uint64), algorithm

    with patched((random_ops_util, "get_key_counter_alg", get_advanced_counter)), tf.device("CPU:0"):
        yield
