"""Each replica's results of a partitioned program are those that one device computes from all rows.

FUZZ_EXAMPLES=2000 python -m pytest -m fuzz --hypothesis-profile=fuzz tests/row_semantics/partitioning_test.py
"""

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
from tfdist.collectives.replica_context import ReplicaContextCollectives
from tfdist.collectives.rows import mask_if_empty
from tfdist.row_semantics.partitioning import NotPartitionedError, PartitionedProgram

# A replica that has no rows computes one that does not count.
BATCHES: list[Batch] = [((1, 2, 4), "normal"), ((2, 0, 3), "ties"), ((3, 1, 1), "rare"), ((1, 1, 0), "positive")]
BATCHES += [((1, 1, 1), "normal"), ((1, 0, 0), "negative"), ((4, 2, 3), "zeros")]
# Programs that change variables, or compare lists of tensors, complex numbers or declared functions over rows.
NOT_PARTITIONED = re.compile("assign|Apply|map_fn|complex|row_wise.*(shape|cumsum)")


def emitted(traced: oracle.Traced, tensors: Sequence[tf.Tensor], size: int = 3) -> Callable[..., Any]:
    """Returns the function of replicas' numbers of rows, and of all rows: for each replica results, and shares."""
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(size)], tf.distribute.ReductionToOneDevice())

    def on_replica(parts: tf.Tensor, *arguments: tf.Tensor) -> Any:
        rank = tf.distribute.get_replica_context().replica_id_in_sync_group
        counted, total = parts[rank], tf.reduce_sum(parts)
        computed = tf.maximum(counted, 1)
        begin = tf.minimum(tf.reduce_sum(parts[:rank]), total - computed)
        rows = [
            tf.ensure_shape(x[begin:][:computed], spec.shape) for x, spec in zip(arguments, traced.specs, strict=True)
        ]
        given = dict(zip(traced.given, rows, strict=True)) | traced.captured
        fed = {reference: (traced.inputs[reference], tensor) for reference, tensor in given.items()}
        collectives = mask_if_empty(ReplicaContextCollectives(size), counted)
        program = PartitionedProgram(traced.graph, fed, tensors, (computed, counted, total), collectives)
        shares = program.shares([each for each in tensors if each.dtype.is_floating])
        return program.full_results(tensors), shares

    @tf.function(autograph=False)
    def run(*arguments: tf.Tensor) -> Any:
        return tf.nest.map_structure(strategy.experimental_local_results, strategy.run(on_replica, arguments))

    return run.get_concrete_function(tf.TensorSpec([size], tf.int32), *traced.specs)


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
        run = emitted(traced, tensors)
    except NotPartitionedError:
        try:
            run = emitted(traced, tensors := tensors[-1:])
        except NotPartitionedError:
            return None
    found = []
    for (parts, arguments), alone in zip(data, runs, strict=True):
        try:
            wholes, shares = run(tf.constant(parts), *map(tf.constant, arguments))
        except tf.errors.OpError:
            with pytest.raises(tf.errors.OpError):  # on one device, too
                emitted(traced, tensors, 1)(tf.constant([sum(parts)]), *map(tf.constant, arguments))
            continue
        tolerances, sums = traced.tolerances([alone]), iter(shares)
        for tensor, replicas in zip(tensors, wholes, strict=True):
            expected, tolerance = alone[tensor.ref()], tolerances[tensor.ref()]
            results = [each.numpy() for each in replicas]
            are_equal = all(each.tobytes() == results[0].tobytes() for each in results)
            if tensor.dtype.is_floating:
                results.append(np.sum([each.numpy() for each in next(sums)], 0))
            if not are_equal or not all(oracle.close(each, expected, tolerance, is_sum=True) for each in results):
                found.append(
                    f"{tensor.name} of {parts}: {[each.tolist() for each in results]}, not {expected.tolist()}"
                )
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
