import json
import math
import re

import numpy as np
import pytest

from tfdist.errors import InputError
from tfdist.reporting import schema


def documented_lines() -> list[dict]:
    """Returns the two example lines in the module's docstring."""
    assert schema.__doc__
    return [json.loads(text) for text in re.findall(r"\{.*?\}", schema.__doc__, re.DOTALL)]


@pytest.mark.parametrize("line", documented_lines(), ids=lambda line: line["kind"])
def test_the_documented_lines_have_the_fields_of_the_table(line):
    fields = {name for name, field in schema.FIELDS.items() if line["kind"] in field.kinds}
    assert set(line) - set(schema.metrics_of(line)) == fields
    assert list(schema.metrics_of(line)) == ["accuracy"]


def test_both_kinds_are_documented_at_the_current_version():
    assert [(line["kind"], line["schema"]) for line in documented_lines()] == [
        (schema.TRAIN, schema.SCHEMA),
        (schema.EVAL, schema.SCHEMA),
    ]


def test_every_field_has_a_meaning_and_a_time_or_size_its_unit():
    for name, field in schema.FIELDS.items():
        assert field.meaning
        assert set(field.kinds) <= {schema.TRAIN, schema.EVAL}
        assert field.unit == "bytes" or not name.endswith("_bytes")
        assert field.unit == "s" or not re.search("_seconds(_|$)", name)


def test_a_metric_with_the_name_of_a_field_is_refused():
    schema.check_metric_names(["accuracy", "top_5_accuracy"])
    with pytest.raises(InputError, match=r"Received: loss, time\.") as caught:
        schema.check_metric_names(["loss", "accuracy", "time"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (True, True),
        (np.bool_(True), True),
        ("text", "text"),
        (3, 3),
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (np.array(0.5), 0.5),
        (math.nan, "nan"),
        (np.float32("inf"), "inf"),
        (-math.inf, "-inf"),
        ({"a": (1, math.nan)}, {"a": [1, "nan"]}),
    ],
    ids=repr,
)
def test_any_number_becomes_json_of_the_right_type(value, expected):
    plain = schema.to_json(value)
    assert plain == expected
    assert type(plain) is type(expected)
    json.dumps(plain, allow_nan=False)


def test_what_json_does_not_have_is_an_error():
    with pytest.raises(TypeError, match="object"):
        schema.to_json({"x": object()})


@pytest.mark.parametrize("value", [math.inf, -math.inf, 0.25, 7])
def test_numbers_are_read_back_as_they_were_written(value):
    assert schema.number(schema.to_json(value)) == value


def test_reading_knows_nan_and_what_is_no_number():
    read = schema.number("nan")
    assert read is not None and math.isnan(read)
    assert [schema.number(value) for value in (None, True, "train", [1.0])] == [None] * 4
