"""Each replica's results of a partitioned program are those that one device computes from all rows.

FUZZ_EXAMPLES=2000 python -m pytest -m fuzz --hypothesis-profile=fuzz tests/row_semantics/partitioning_test.py
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.row_semantics import oracle, programs
from tests.row_semantics.programs_test import WRITTEN, Batch
from tfdist.collectives.interface import Collectives, Op
from tfdist.collectives.replica_context import ReplicaContextCollectives
from tfdist.collectives.rows import mask_if_empty
from tfdist.row_semantics.partitioning import NotPartitionedError, PartitionedProgram

# A replica that has no rows computes one that does not count. Means of ties over powers of 2 are exact: where a function
# jumps, rounding would decide.
BATCHES: list[Batch] = [((1, 2, 4), "normal"), ((2, 1, 1), "ties"), ((3, 0, 2), "rare"), ((1, 1, 0), "positive")]
BATCHES += [((1, 1, 1), "normal"), ((1, 0, 0), "negative"), ((4, 2, 3), "zeros")]
# Programs that change variables, or compare lists of tensors, complex numbers or declared functions over rows.
NOT_PARTITIONED = re.compile("assign|Apply|element_shape=-1|map_fn|complex|row_wise.*(shape|cumsum)")


class _InterpretedCollectives(Collectives):
    """Collectives of a graph that `Replicas` computes: their calls are IdentityN operations with names of their own."""

    dtypes = ReplicaContextCollectives.dtypes

    def __init__(self, size: int, rank: tf.Tensor):
        self.size, self._rank = size, rank

    @property
    def rank(self) -> tf.Tensor:
        return self._rank

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: Op = "sum", *, name: str) -> list[tf.Tensor]:
        return tf.raw_ops.IdentityN(input=tensors, name=f"collective_{op}")

    def all_gather(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        return tf.raw_ops.IdentityN(input=tensors, name="collective_gather")


_COMPUTATIONS: dict[str, Callable[[Sequence[tf.Tensor]], tf.Tensor]] = {
    "sum": lambda values: functools.reduce(tf.add, values),
    "max": lambda values: functools.reduce(tf.maximum, values),
    "gather": lambda values: tf.concat(values, 0),
}


class Replicas:
    """A partitioned program, whose replicas are computed side by side, one operation after the other."""

    def __init__(self, traced: oracle.Traced, tensors: Sequence[tf.Tensor], size: int = 3):
        self._evaluator, self._size, self.has_failed_assertion = oracle.Evaluator(), size, False
        with tf.__internal__.FuncGraph("replica").as_default() as self._graph:
            self._rank, self._parts = tf.compat.v1.placeholder(tf.int32, []), tf.compat.v1.placeholder(tf.int32, [size])
            self._arguments = [tf.compat.v1.placeholder(spec.dtype, spec.shape) for spec in traced.specs]
            counted, total = self._parts[self._rank], tf.reduce_sum(self._parts)
            computed = tf.maximum(counted, 1)
            begin = tf.minimum(tf.reduce_sum(self._parts[: self._rank]), total - computed)
            rows = [tf.ensure_shape(each[begin:][:computed], each.shape) for each in self._arguments]
            given = dict(zip(traced.given, rows, strict=True)) | traced.captured
            fed = {reference: (traced.inputs[reference], tensor) for reference, tensor in given.items()}
            collectives = mask_if_empty(_InterpretedCollectives(size, self._rank), counted)
            program = PartitionedProgram(traced.graph, fed, tensors, (computed, counted, total), collectives)
            # Shares first: a sum that is already known is divided by the number of replicas.
            self._shares = program.shares([each for each in tensors if each.dtype.is_floating])
            self._wholes = program.full_results(tensors)

    def __call__(self, parts: tf.Tensor, *arguments: tf.Tensor) -> Any:
        """Returns each replica's results, and its shares of those that are floating-point; None for what has failed."""
        fed = dict(zip([each.ref() for each in self._arguments], arguments, strict=True)) | {self._parts.ref(): parts}
        fed |= {inside.ref(): outside for outside, inside in self._graph.captures}
        replicas = [fed | {self._rank.ref(): tf.constant(rank)} for rank in range(self._size)]
        for step in self._evaluator.steps(self._graph):
            if step.outputs and step.outputs[0] in fed or step.outputs == [self._rank.ref()]:
                continue
            try:
                inputs = [[replica[each] for each in step.inputs] for replica in replicas]
                if step.name.startswith("collective_"):
                    compute = _COMPUTATIONS[step.name.split("_")[1]]
                    results = [[compute(values) for values in zip(*inputs, strict=True)]] * self._size
                else:
                    results = [self._evaluator.results(step, each) for each in inputs]
            except (tf.errors.OpError, KeyError):  # it or one of its inputs has failed
                self.has_failed_assertion = self.has_failed_assertion or step.kind == b"Assert"
                continue
            for replica, computed in zip(replicas, results, strict=True):
                replica.update(zip(step.outputs, computed, strict=True))
        return [
            [[replica.get(each.ref()) for replica in replicas] for each in tensors]
            for tensors in (self._wholes, self._shares)
        ]


def differences(program: list[programs.Instruction] | str, batches: Sequence[Batch], seed: int = 1) -> list[str] | None:
    """Returns which tensors of a program differ from those of one device; None if it is not partitioned."""
    traced = oracle.Traced(programs.function_of(program), *programs.SPECS)
    data = [(parts, oracle.draw(programs.SPECS, sum(parts), kind, seed)) for parts, kind in batches]
    runs = [traced.run(arguments)[0] for _, arguments in data]
    computed = [each for operation in traced.operations if operation.inputs for each in operation.outputs]
    tensors = [
        each for each in computed if all(each.ref() in run for run in runs) and each.op.name not in traced.random
    ]
    try:
        run = Replicas(traced, tensors)
    except NotPartitionedError:
        try:
            run = Replicas(traced, tensors := tensors[-1:])
        except NotPartitionedError:
            return None
    found = []
    for (parts, arguments), alone in zip(data, runs, strict=True):
        wholes, shares = run(tf.constant(parts), *map(tf.constant, arguments))
        found += ["an assertion has failed"] if run.has_failed_assertion else []
        tolerances, shares_of = traced.tolerances([alone]), iter(shares)
        for tensor, replicas in zip(tensors, wholes, strict=True):
            share = next(shares_of) if tensor.dtype.is_floating else []
            if tensor.op.name in traced.unbroadcast:  # over a dim of 1, gradients are summed or not, and then reshaped
                continue
            if any(each is None for each in (*replicas, *share)):
                found.append(f"{tensor.name} of {parts} has failed")
                continue
            expected, tolerance = alone[tensor.ref()], tolerances[tensor.ref()]
            results = [each.numpy() for each in replicas]
            are_equal = all(each.tobytes() == results[0].tobytes() for each in results)
            # Thirds of the largest number, which is the gradient of some functions at their ends, sum to infinity.
            if share and not (np.abs(expected) == tensor.dtype.max).any():
                with np.errstate(over="ignore"):
                    results.append(np.sum([each.numpy() for each in share], 0))
            if not are_equal or not all(oracle.close(each, expected, tolerance, is_sum=True) for each in results):
                values = [each.tolist() for each in results]
                found.append(f"{tensor.name} of {parts}: {values}, not {expected.tolist()}")
    return found


@pytest.mark.parametrize("program", WRITTEN.values(), ids=list(WRITTEN))
def test_results_are_those_of_one_device(program: str):
    assert differences(program, BATCHES[:4]) == (None if NOT_PARTITIONED.search(program) else [])


@pytest.mark.fuzz
@given(programs.PROGRAMS, st.integers(1, 1000))
@settings(max_examples=settings().max_examples if settings().max_examples > 100 else 25)
def test_results_of_drawn_programs_are_those_of_one_device(program: list[programs.Instruction], seed: int):
    without = [each for each in program if each[0] != "assign"]  # of which there is no partition
    assert not differences(without, [BATCHES[seed % 4], BATCHES[4 + seed % 3]], seed)
