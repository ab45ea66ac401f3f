"""Parsing TF_CONFIG: addresses, rank, and the address of the control plane."""

import json

import pytest

from tfdist.cluster.tf_config import EXAMPLE, control_address, is_evaluator, parse
from tfdist.errors import InputError

TWO = ["a:1", "b:1"]


def text(cluster, task=("worker", 0)):
    return json.dumps({"cluster": cluster, "task": {"type": task[0], "index": task[1]}})


@pytest.mark.parametrize(
    ("cluster", "task", "addresses", "rank"),
    [
        ({"worker": ["a:1"]}, ("worker", 0), ("a:1",), 0),
        ({"worker": TWO}, ("worker", 1), ("a:1", "b:1"), 1),
        ({"worker": TWO}, ("worker", "1"), ("a:1", "b:1"), 1),
        ({"worker": TWO, "chief": ["c:1"]}, ("chief", 0), ("c:1", "a:1", "b:1"), 0),
        ({"worker": TWO, "chief": ["c:1"]}, ("worker", 0), ("c:1", "a:1", "b:1"), 1),
        ({"chief": ["c:1"]}, ("chief", 0), ("c:1",), 0),
        ({"worker": TWO, "evaluator": ["e:1"], "ps": []}, ("worker", 1), ("a:1", "b:1"), 1),
        ({"ps": ["p:1", "q:1"], "worker": TWO, "chief": ["c:1"]}, ("ps", 1), ("c:1", "a:1", "b:1", "p:1", "q:1"), 4),
        ({"worker": ["[::1]:1", "[fe80::1]:1"]}, ("worker", 1), ("[::1]:1", "[fe80::1]:1"), 1),
    ],
)
def test_ranks(cluster, task, addresses, rank):
    assert parse(text(cluster, task)) == (addresses, rank, len(cluster.get("ps", ())))


def test_the_example_in_the_messages_is_right():
    assert parse(EXAMPLE.removeprefix("TF_CONFIG='").removesuffix("'")) == (("host1:12345", "host2:12345"), 0, 0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"task": {"type": "worker", "index": 0}}', "must have a `cluster`"),
        (json.dumps({"cluster": {"worker": TWO}}), "must have a `task`"),
        (json.dumps({"cluster": {"worker": TWO}, "task": {"type": "worker"}}), "must have a `task`"),
        (json.dumps({"cluster": {"worker": TWO}, "task": "worker"}), "must have a `task`"),
        (text({"worker": TWO}, ("wroker", 0)), r"task type must be one of \['worker'\]. Received: 'wroker'"),
        (text({"worker": TWO}, (["worker"], 0)), "task type must be one of"),
        (text({"worker": TWO}, ("worker", 2)), r"index must be in \[0, 2\).*Received: 2"),
        (text({"worker": TWO}, ("worker", -1)), "index must be in"),
        (text({"worker": TWO}, ("worker", True)), "index must be in"),
        (text({"worker": TWO}, ("worker", None)), "index must be in"),
        (text({"worker": TWO, "evaluator": ["e:1"]}, ("evaluator", 0)), "may be an evaluator only.*`tfdist evaluate`"),
        (text({"worker": TWO, "ps": ["p:1"]}, ("ps", 1)), r"index must be in \[0, 1\)"),
        (text({"worker": TWO, "ps": ["a:1"]}), "a different address"),
        (text({"worker": TWO, "master": ["m:1"]}), "may have chief, worker, ps and evaluator. Received: 'master'"),
        (text({"worker": "a:1"}), "must list host:port"),
        (text({"worker": ["a:0"]}), "must list host:port"),
        (text({"worker": ["a:65536"]}), "must list host:port"),
        (text({"worker": ["::1:5"]}), "must list host:port"),
        (text({"worker": [5]}), "must list host:port"),
        (text({"worker": []}), "must have a worker"),
        (text({"evaluator": ["e:1"]}), "must have a worker"),
        (text({"chief": ["c:1", "d:1"], "worker": TWO}), "at most one chief"),
        (text({"chief": ["a:1"], "worker": ["a:1"]}), "a different address"),
        (text({"worker": ["localhost:1", "127.0.0.1:1"]}), "a different address"),
    ],
)
def test_errors_are_one_line(config, message):
    """Others are in tests/cli/wrong_uses.tsv."""
    with pytest.raises(InputError, match=message) as error:
        parse(config)
    assert "\n" not in str(error.value)


def test_an_evaluator_need_not_be_in_the_cluster():
    task = {"type": "evaluator", "index": 0}
    assert is_evaluator(json.dumps({"task": task})) and is_evaluator(text({"worker": TWO}, ("evaluator", "0")))
    assert not any(map(is_evaluator, ("", "{", "[]", "3", '{"task": 3}', text({"worker": TWO}))))
    with pytest.raises(InputError, match="may have only one evaluator, with index 0. Received: index 1"):
        is_evaluator(text({"worker": TWO}, ("evaluator", 1)))


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        (["a:2000", "b:2000"], "a:3000"),
        (["a:64535", "b:2000"], "a:65535"),
        (["a:64536", "b:2000"], "a:63536"),
        (["a:2000", "a:3000", "a:2999"], "a:2998"),
        (["a:65000", "a:64000", "a:64001"], "a:64002"),
        (["a:2000", "b:3000"], "a:3000"),
        (["localhost:2000", "127.0.0.1:3000"], "localhost:2999"),
        (["[::1]:2000", "b:1"], "[::1]:3000"),
    ],
)
def test_control_address_is_nobody_elses(addresses, expected):
    assert control_address(addresses) == expected
