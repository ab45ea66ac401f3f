"""Traces with symbolic tensors, and functions of Keras that are replaced meanwhile."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf
from keras.src.backend import nn
from keras.src.backend.common.symbolic_scope import SymbolicScope
from keras.src.losses import losses

_MODULES = {"convert_binary_labels_to_hinge": losses, "conv": nn, "ctc_loss": nn, "depthwise_conv": nn}


@contextlib.contextmanager
def symbolic_graph(name: str) -> Iterator[Any]:
    """Context in which operations are added to a graph that is never run; yields the graph.

    Inside a strategy's scope, but outside of its replica functions, code is called as if there were no strategy: it could
    not differentiate with respect to mirrored variables.
    """
    with tf.__internal__.FuncGraph(name).as_default() as graph, SymbolicScope():
        if tf.distribute.in_cross_replica_context():
            graph._distribution_strategy_stack = []
        yield graph


@contextlib.contextmanager
def functions_wrapped(wrappers: Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]]) -> Iterator[None]:
    """Context in which some of Keras's private functions, by name, are wrapped."""
    originals = {name: getattr(_MODULES[name], name) for name in wrappers}
    for name, wrap in wrappers.items():
        setattr(_MODULES[name], name, wrap(originals[name]))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(_MODULES[name], name, original)
