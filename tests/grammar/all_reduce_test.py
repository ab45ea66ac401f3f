"""Algorithms of sums: the flag's grammar, and tables by size."""

import pytest

from tfdist.errors import InputError
from tfdist.grammar.all_reduce import (
    ALGORITHMS,
    LARGEST,
    AlgorithmTable,
    AllReduce,
    Band,
    parse_all_reduce,
    parse_table,
)

TABLE = AlgorithmTable((Band(0, 65536, "tree"), Band(65537, 2**20, "engine"), Band(2**20 + 1, LARGEST, "hierarchical")))


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        *((name, AllReduce(name)) for name in ALGORITHMS),
        ("auto", AllReduce("auto")),
        ("auto(table='runs/a b/all_reduce.csv')", AllReduce("auto", "runs/a b/all_reduce.csv")),
        ("auto(table=runs/one/all_reduce.csv)", AllReduce("auto", "runs/one/all_reduce.csv")),
        ("auto( table = s3://bucket/x.csv )", AllReduce("auto", "s3://bucket/x.csv")),
    ],
)
def test_what_can_be_chosen(text, choice):
    assert parse_all_reduce(text) == choice
    assert choice.is_measured == (text == "auto")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rign", 'rign is not an all-reduce algorithm. Did you mean "ring"?'),
        ("ring(x=1)", 'ring has no parameter "x". It has none.'),
        ("auto(tabel='x')", 'auto has no parameter "tabel". Did you mean "table"?'),
        ("auto(table=)", "table must be the name of a file. Received: ''."),
        ("auto(table='')", "table must be the name of a file. Received: ''."),
        ("", "expected a name"),
    ],
)
def test_what_cannot(text, message):
    with pytest.raises(InputError) as error:
        parse_all_reduce(text)
    assert message in str(error.value)


def test_a_table_is_read_as_it_was_written():
    text = TABLE.to_csv(["4.0 KiB: engine 1 ms"])
    assert text.splitlines() == [
        "# 4.0 KiB: engine 1 ms",
        "collective,min_bytes,max_bytes,algorithm",
        "allreduce,0,65536,tree",
        "allreduce,65537,1048576,engine",
        f"allreduce,1048577,{LARGEST},hierarchical",
    ]
    assert parse_table(text, "x.csv") == TABLE
    assert TABLE.algorithms == ("engine", "tree", "hierarchical")


def test_files_of_nccl_s_tuner_have_more_columns_and_collectives():
    text = "broadcast,0,32768,tree,simple,1,1,2\nallreduce,0,1024,ring,simple,2,1,2,-1,-1\n"
    assert parse_table(text, "x.csv").bands == (Band(0, 1024, "ring"),)


@pytest.mark.parametrize("size", [0, 1, 65536, 65537, 2**20, 2**20 + 1, LARGEST])
def test_the_algorithm_of_a_size(size):
    assert TABLE.algorithm_for(size) == ("tree" if size <= 65536 else "engine" if size <= 2**20 else "hierarchical")
    assert AlgorithmTable((Band(8, 16, "ring"),)).algorithm_for(size) == "engine", "sizes in no band"
    assert AlgorithmTable.of("ring").algorithm_for(size) == "ring"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "x.csv must have at least one line allreduce,MIN,MAX,ALGORITHM. Received: none."),
        ("allreduce,0,x,ring", "x.csv, line 1: must be collective,min_bytes,max_bytes,algorithm, with sizes in bytes."),
        ("allreduce,0", "x.csv, line 1: must be collective,"),
        ("# a\nallreduce,0,9,rign", 'x.csv, line 2: rign is not an all-reduce algorithm. Did you mean "ring"?'),
        ("allreduce,0,9,ring\nallreduce,9,20,tree", "x.csv, line 2: Ranges of sizes must ascend and must not overlap."),
        ("allreduce,9,0,ring", "x.csv, line 1: Ranges of sizes must ascend"),
    ],
)
def test_what_is_not_a_table(text, message):
    with pytest.raises(InputError) as error:
        parse_table(text, "x.csv")
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)
