"""Defects of Horovod on which the design depends, measured on three real ranks: a version that fixes one fails here."""

import json
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tests import jobs as processes

pytestmark = [pytest.mark.processes, pytest.mark.full]

WORKER = pathlib.Path(__file__).with_name("horovod_worker.py")
SIZE = 3
HOROVOD_DEFAULTS = {"HOROVOD_FUSION_THRESHOLD": str(128 * 2**20), "HOROVOD_CYCLE_TIME": "1"}


def outcomes(environment: dict[str, str]) -> list[dict[str, Any]]:
    with processes.job([sys.executable, str(WORKER)], SIZE, environment) as job:
        ended = job.wait(300)
    assert [end.code for end in ended] == [0] * SIZE, "\n".join(end.output for end in ended)
    return [json.loads(end.output.strip().splitlines()[-1]) for end in ended]


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """The results with Horovod's own settings."""
    return outcomes(HOROVOD_DEFAULTS)


def test_its_keras_optimizer_reduces_nothing(ranks: list[dict[str, Any]]) -> None:
    """Guards: with Keras 3, `horovod.tensorflow.keras.DistributedOptimizer` silently trains each rank alone.

    What depends on it: strategies/horovod.py and tfdist/collectives/horovod.py use Horovod's operations only.
    """
    weights = [np.array(rank["weights"]) for rank in ranks]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert np.linalg.norm(weights[a] - weights[b]) > 1e-2, "Horovod's Keras optimizer reduces now"


def test_reducescatter_slows_every_later_allreduce(ranks: list[dict[str, Any]]) -> None:
    """Guards: after one reducescatter under Gloo, all-reduces stay many times slower, but not after alltoall.

    What depends on it: tfdist/collectives/horovod.py composes reduce_scatter of all_to_all and a local sum.
    """
    for rank in ranks:
        assert rank["seconds_after_reducescatter"] >= 3 * rank["seconds"], rank
        assert 3 * rank["seconds_after_alltoall"] < rank["seconds_after_reducescatter"], rank


def test_in_a_graph_its_operations_are_free_of_effects(ranks: list[dict[str, Any]]) -> None:
    """Guards: an all-reduce of a constant only runs once, when a graph is optimized; one whose result is unused never runs.

    What depends on it: tfdist/collectives/horovod.py hides constants from TensorFlow, and its barrier's value is used. Without
    the former, a gradient that is zero on one rank only makes the others wait forever at the second step.
    """
    for rank in ranks[:-1]:  # the last rank is late
        waits, late = rank["waits"], rank["late"]
        assert max(waits["constant"], waits["unused"]) < 0.4 * late, waits
        assert min(waits["our constant"], waits["our barrier"]) > 0.6 * late, waits


def test_a_loop_makes_its_operations_once(ranks: list[dict[str, Any]]) -> None:
    """Guards: loop-invariant operations are moved out of a loop, including Horovod's.

    What depends on it: tfdist/collectives/horovod.py hides constants behind an operation with side effects;
    tfdist/step/compiled_loop.py makes many steps per call. Horovod polls its queue every millisecond here.
    """
    for rank in ranks:
        seconds = rank["seconds_of_a_turn"]
        assert 2 * seconds["constant"] < min(seconds["our constant"], seconds["our barrier"]), seconds


def test_its_operations_take_no_bfloat16(ranks: list[dict[str, Any]]) -> None:
    """Guards: Horovod's operations have no bfloat16, over whichever library, neither to sum nor to move.

    What depends on it: `dtypes` of tfdist/collectives/horovod.py; tfdist sends 16 bits as bytes and sums them in float32.
    """
    for rank in ranks:
        assert set(rank["bfloat16"]) == {"allreduce", "allgather", "alltoall", "broadcast", "reducescatter"}
        assert all("bfloat16 not in list of allowed values" in error for error in rank["bfloat16"].values()), rank


def test_broadcasts_are_merged_and_pruned(ranks: list[dict[str, Any]]) -> None:
    """Guards: of two broadcasts with equal inputs one is left, and none of one that is a control dependency only.

    What depends on it: `send` and `receive` of tfdist/collectives/horovod.py hide inputs and use each result; otherwise the
    other rank would wait forever.
    """
    for number, rank in enumerate(ranks):
        expected = 2 if number < 2 else 0
        assert rank["broadcasts"] == {"equal": 1, "awaited": 0, "our messages": expected}, rank


def test_eager_broadcasts_have_no_names(ranks: list[dict[str, Any]]) -> None:
    """Guards: eagerly, Horovod confuses broadcasts of different names.

    What depends on it: `send` and `receive` of tfdist/collectives/horovod.py make each message in a `tf.function`.
    """
    assert all("Mismatched BROADCAST root ranks" in rank["eager_broadcasts"] for rank in ranks), ranks


def test_equal_process_sets() -> None:
    """Guards: Horovod does not start with a process set that is equal to another one, such as that of all ranks.

    What depends on it: `distinct_groups` of tfdist/collectives/process_groups.py.
    """
    code = "import horovod.tensorflow as hvd; hvd.init(process_sets=[hvd.ProcessSet([0])])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode and "mismatching numbers of process sets" in ended.stderr, ended.stderr


def test_fusion_by_timing_is_not_reproducible(ranks: list[dict[str, Any]]) -> None:
    """Guards: with Horovod's default fusion, sums differ bitwise by what else is under way; without fusion they do not.

    What is under way depends on timing, so that runs are not reproducible.

    What depends on it: strategies/horovod.py sets HOROVOD_FUSION_THRESHOLD=0, and tfdist forms its own buckets.
    """
    assert all(rank["different_sums"] > 0 for rank in ranks), ranks
    assert all(rank["different_sums"] == 0 for rank in outcomes({})), "tfdist's own settings"
