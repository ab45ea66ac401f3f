"""Detection of a process's rank in the job, with several sources at once."""

import json

import pytest

from tfdist.cluster.detection import describe, detect_cluster
from tfdist.cluster.environment import Cluster
from tfdist.errors import InputError

HOROVOD = {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "0", "HOROVOD_LOCAL_SIZE": "1"}


def tf_config(size, index):
    workers = [f"h{i}:1" for i in range(size)]
    return {"TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}})}


def test_sources_that_agree_complete_each_other():
    found = detect_cluster(HOROVOD | tf_config(2, 1))
    assert found == Cluster(1, 2, 0, 1, ("h0:1", "h1:1"), "h0:1001", "Horovod")
    assert describe(found) == "Horovod says that this is rank 1 of 2"


def test_sources_that_disagree_are_refused():
    with pytest.raises(
        InputError, match="Horovod says that this is rank 1 of 2; TF_CONFIG says that this is rank 0 of 2"
    ):
        detect_cluster(HOROVOD | tf_config(2, 0))


def test_one_process_without_any_source():
    assert detect_cluster({}) == Cluster()
    assert describe(Cluster()) == "this is one process"
