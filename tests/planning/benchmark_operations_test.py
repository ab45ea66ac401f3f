import pytest
import tensorflow as tf

from tfdist.collectives import RecordingCollectives
from tfdist.errors import InputError
from tfdist.planning.benchmark_results import TRAFFIC
from tfdist.planning.benchmark_timing import OPERATIONS, check_dtype


def test_there_is_a_call_for_each():
    assert list(OPERATIONS) == list(TRAFFIC)


@pytest.mark.parametrize(
    ("name", "size", "elements"),
    [
        ("all_reduce", 4096, (1024, 4096)),
        ("broadcast", 4096, (1024, 4096)),
        ("all_gather", 4096, (256, 4096)),
        ("all_to_all", 4096, (1024, 4096)),
        ("reduce_scatter", 4096, (1024, 4096)),
        ("all_reduce", 3, (1, 4)),
        ("all_gather", 4, (1, 16)),
        ("all_to_all", 4, (4, 16)),
        ("reduce_scatter", 100, (24, 96)),
    ],
)
def test_sizes_are_of_whole_elements_and_equal_parts(name, size, elements):
    assert OPERATIONS[name].elements(size, itemsize=4, replicas=4) == elements


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_calls_its_own_operation(name, mirrored2):
    recording = RecordingCollectives(mirrored2.collectives)
    handed_over, size = OPERATIONS[name].elements(64, 4, 2)

    @tf.function(autograph=False)
    def step():
        return mirrored2.run(lambda: OPERATIONS[name].call(recording, tf.ones([handed_over]), "name"))

    results = mirrored2.local(step())
    calls = [call for call in recording.calls if call.operation == name]
    assert len(calls) == 2 == len(results), "one on each replica"
    if name != "barrier":
        assert {call.payload_bytes for call in calls} == {32 if name == "all_gather" else 64}
        assert {result.shape.num_elements() for result in results} == {8 if name == "reduce_scatter" else 16}
        assert size == 64


def test_what_an_engine_does_not_carry_is_refused(mirrored2):
    check_dtype(mirrored2.collectives, ("all_reduce",), tf.bfloat16)
    check_dtype(mirrored2.collectives, ("barrier",), tf.int8)
    with pytest.raises(InputError, match=r"by all_gather of this strategy: float16, .* Received: bfloat16. Choose one"):
        check_dtype(mirrored2.collectives, ("all_reduce", "all_gather"), tf.bfloat16)
    with pytest.raises(InputError, match="by reduce_scatter of this strategy"):
        check_dtype(mirrored2.collectives, ("reduce_scatter",), tf.int8)
