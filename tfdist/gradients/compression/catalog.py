"""Compression methods by name, and the reducer that `--compression` describes."""

import dataclasses
import importlib
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import tensorflow as tf

from tfdist.config.rules import first_match, parse_rules
from tfdist.config.spec import Spec, call, load_object, remove_mark
from tfdist.errors import InputError, nearest
from tfdist.gradients.bucket import BACKWARD, BUCKET_BYTES, SMALL_BYTES, Bucketed
from tfdist.gradients.compression.arguments import validate_flag
from tfdist.gradients.compression.codec import Codec
from tfdist.gradients.compression.reducers import CodecReducer
from tfdist.gradients.reducer import ErrorFeedback, PartitionedReducer, Reducer, SparseRows, Sum
from tfdist.reporting.warn_once import warn_once

# name -> module of this package and class in it; `none`, the exact sum, is not listed.
METHODS = {
    "fp16": "casts:FP16",
    "bf16": "casts:BF16",
    "int8": "quantization:Int8",
    "qsgd": "quantization:QSGD",
    "terngrad": "quantization:TernGrad",
    "onebit": "quantization:OneBit",
    "signsgd": "quantization:SignSGD",
    "topk": "sparsification:TopK",
    "threshold": "sparsification:Threshold",
    "randomk": "random_projections:RandomK",
    "projection": "random_projections:Projection",
    "sketch": "random_projections:Sketch",
    "powersgd": "powersgd:PowerSGD",
    "dgc": "sparsification:DGC",
}

COMPRESSION_MIN_BYTES = 64 * 1024
EXACT = "none"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """`--compression=auto`: a method for each gradient, chosen by measurement.

    Attributes:
      after: step before which methods are chosen, at least 1; until then sums are exact.
      allow: candidate methods besides `none`, separated by semicolons.
    """

    after: int = 10
    allow: str = "bf16; powersgd(rank=4)"

    def __post_init__(self) -> None:
        if self.after < 1:
            raise InputError(f"--compression=auto chooses methods after at least 1 step. Received: after={self.after}.")
        check(self.allow)

    @property
    def candidates(self) -> tuple[str, ...]:
        """The candidate methods, `none` first."""
        return tuple(dict.fromkeys([EXACT, *(str(rule) for rule in parse_rules(self.allow))]))


def parse_choice(text: str) -> Choice | None:
    """Parses `auto` or `auto(after=10, allow='fp16; powersgd(rank=4)')`; returns None for any other text."""
    rules = parse_rules(text)
    spec = rules[0].methods[0]
    if spec.name != "auto" or len(rules) > 1 or len(rules[0].methods) > 1:
        return None
    return call(Choice, spec)


def create(methods: Sequence[Spec]) -> Reducer:
    """Creates the reducer of a method, or of two separated by |, without buckets.

    Every method also takes `feedback=True` or `False`: whether to use error feedback. The default is True for biased
    methods.

    Args:
      methods: names in `METHODS`, `none`, or a user-defined `package.module:name`, a subclass of `Codec` or `Reducer`.

    Raises:
      InputError: a name or parameter is unknown or out of range, or the two methods cannot be combined.
    """
    feedback = [validate_flag(s.name, "feedback", s.args["feedback"]) for s in methods if "feedback" in s.args]
    parts = [
        _create_method(Spec(spec.name, {k: v for k, v in spec.args.items() if k != "feedback"})) for spec in methods
    ]
    first = parts[0]
    for spec, second in zip(methods[1:], parts[1:], strict=True):
        combine = getattr(first, "then", None)
        if combine is None or not isinstance(second, Codec):
            raise InputError(
                "A | combines a method that sends values, such as topk or powersgd, with one that encodes values, such "
                f"as fp16. Received: {'|'.join(map(str, methods))}. Remove |{spec}."
            )
        first = combine(second)
    reducer = CodecReducer(first) if isinstance(first, Codec) else first
    if feedback and feedback[-1] and reducer.stores_unsent:
        raise InputError(f"{methods[0].name} has its own error feedback. Received: {methods[0]}. Remove feedback.")
    if reducer.experimental:
        text = "|".join(map(str, methods))
        warn_once(
            f"Compression by {text} is experimental: it has not been shown both to train well and to save time on any link."
        )
    has_feedback = feedback[-1] if feedback else reducer.biased
    return ErrorFeedback(reducer) if has_feedback else reducer


def check(text: str) -> None:
    """Raises `InputError` if the text of `--compression` names an unknown method or parameter."""
    for rule in parse_rules(text) if parse_choice(text) is None else []:
        create(rule.methods)


def create_reducer(
    specs: Sequence[tf.TensorSpec],
    text: str,
    *,
    overrides: Mapping[str, str] = MappingProxyType({}),
    sparse: Collection[str] = (),
    min_bytes: int = COMPRESSION_MIN_BYTES,
    small_bytes: int = SMALL_BYTES,
    bucket_bytes: int = BUCKET_BYTES,
    bucket_order: str = BACKWARD,
) -> Reducer:
    """Creates the reducer that `--compression` describes.

    Args:
      specs: tensors to sum, named by variable paths as in `unique_names`; rules match these names.
      text: see `tfdist.config.rules`. Tensors that match no rule are summed exactly.
      overrides: methods for individual tensors, by name; they take precedence over the rules.
      sparse: names of tensors that may be `tf.IndexedSlices`.
      min_bytes: tensors smaller than this, and scalars, are summed exactly.
      small_bytes: see `tfdist.gradients.plan`.
      bucket_bytes: see `tfdist.gradients.plan`.
      bucket_order: see `Bucketed`.
    """
    partitions: dict[tuple[str, bool], list[int]] = {}
    for i, methods in enumerate(choose_methods(specs, text, overrides, min_bytes)):
        partitions.setdefault((methods, specs[i].name in sparse), []).append(i)
    reducers = []
    for (methods, is_sparse), indices in partitions.items():
        reducer = _add_buckets(create(parse_rules(methods)[0].methods), small_bytes, bucket_bytes, bucket_order)
        names = [specs[i].name for i in indices]
        reducers.append((indices, SparseRows(reducer, names) if is_sparse else reducer))
    return reducers[0][1] if len(reducers) == 1 else PartitionedReducer(reducers)


def choose_methods(
    specs: Sequence[tf.TensorSpec], text: str, overrides: Mapping[str, str], min_bytes: int
) -> list[str]:
    """Returns the methods of each tensor, as normalized text; see `create_reducer`."""
    rules = parse_rules(text)
    methods = []
    for spec in specs:
        elements = spec.shape.num_elements()
        rule = first_match(rules, remove_mark(spec.name), elements)
        if not spec.shape.rank or elements * spec.dtype.size < min_bytes:
            methods.append(EXACT)
        elif spec.name in overrides:
            methods.append(str(parse_rules(overrides[spec.name])[0]))
        else:
            methods.append(str(rule) if rule else EXACT)
    return methods


def _add_buckets(reducer: Reducer, *options: Any) -> Reducer:
    """Adds buckets inside error feedback, so an error belongs to a variable and does not depend on the buckets."""
    if isinstance(reducer, ErrorFeedback):
        return ErrorFeedback(_add_buckets(reducer.inner, *options))
    return reducer if reducer.packs else Bucketed(reducer, *options)


def _create_method(spec: Spec) -> Codec | Reducer:
    if spec.name == "none":
        return call(Sum, spec)
    if ":" in spec.name:
        method = call(load_object(spec.name), spec)
        if not isinstance(method, Codec | Reducer):
            raise InputError(f"--compression={spec} must create a Codec or Reducer. Received: {type(method).__name__}.")
        return method
    if spec.name not in METHODS:
        raise InputError(f"--compression={spec.name} is not known.{nearest(spec.name, ('auto', 'none', *METHODS))}")
    module, name = METHODS[spec.name].split(":")
    return call(getattr(importlib.import_module(f"tfdist.gradients.compression.methods.{module}"), name), spec)
