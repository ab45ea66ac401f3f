import gzip
import struct

import numpy as np
import pytest
import tensorflow as tf

from tests.data.formats.writing import example, write_records
from tfdist.data import EvaluationPipeline, Pipeline, load
from tfdist.errors import InputError


def everything(source):
    [(x, y)] = EvaluationPipeline(source, source.size).dataset([0], 1).as_numpy_iterator()
    return x, y


def shards(folder, sizes=(3, 0, 5), **extra):
    """Writes shards of images that are all of one value, the number of the example; returns their pattern."""
    number = 0
    for shard, size in enumerate(sizes):
        records = []
        for _ in range(size):
            image = tf.io.encode_png(np.full((2, 3, 1), number, np.uint8)).numpy()
            records.append(example(**{"image/encoded": image, "label": number % 3}, **extra))
            number += 1
        write_records(folder / f"train-{shard}.tfrecord", records)
    return f"tfrecord:{folder}/train-*.tfrecord"


FEATURES = '(features="image/encoded: image, label: int64", classes=3, channels=1)'


def test_records_of_all_shards_are_examples(tmp_path):
    found = load(shards(tmp_path) + FEATURES)
    assert (found.train.size, found.input_shape, found.classes) == (8, (2, 3, 1), 3)
    x, y = everything(found.train)
    np.testing.assert_allclose(x[:, 0, 0, 0] * 255, np.arange(8), rtol=1e-6)
    np.testing.assert_array_equal(y, np.arange(8) % 3)


def test_the_order_is_a_permutation_in_each_epoch_and_begins_anywhere(tmp_path):
    source = load(shards(tmp_path) + FEATURES).train

    def numbers(first, replicas=1):
        dataset = Pipeline(source, 4, seed=1, first=first).dataset(list(range(replicas)), replicas)
        return np.concatenate([x[:, 0, 0, 0] * 255 for x, _ in dataset.take(4 * replicas).as_numpy_iterator()]).round()

    stream = numbers(0)
    assert sorted(stream[:8]) == sorted(stream[8:]) == list(range(8))
    assert stream[:8].tolist() not in (list(range(8)), stream[8:].tolist())
    np.testing.assert_array_equal(numbers(4)[:12], stream[4:])
    np.testing.assert_array_equal(numbers(0, replicas=3), stream)


def test_features_of_each_type(tmp_path):
    records = [
        example(a=[1.0, float(i)], b=[i, i + 1, i + 2], text=b"t%d" % i, pixels=bytes(range(i, i + 6)), y=[float(i)])
        for i in range(4)
    ]
    path = write_records(tmp_path / "all.tfrecord", records)
    features = "a:float32[2], b:int64[3], text:string, pixels:uint8[2,3], y:float32[1]"
    found = load(f'tfrecord:{path}(features="{features}")')
    assert (found.input_shape, found.classes) == ((), None)
    x, y = everything(found.train)
    np.testing.assert_array_equal(x["a"], [[1, i] for i in range(4)])
    np.testing.assert_array_equal(x["b"], [[i, i + 1, i + 2] for i in range(4)])
    assert x["text"].tolist() == [b"t0", b"t1", b"t2", b"t3"]
    np.testing.assert_allclose(x["pixels"] * 255, [np.arange(i, i + 6).reshape(2, 3) for i in range(4)], rtol=1e-6)
    np.testing.assert_array_equal(y, [[0], [1], [2], [3]])
    x, y = everything(load(f'tfrecord:{path}(features="b:int64[3],a:float32[2]", label="b")').train)
    assert x.shape == (4, 2) and y.shape == (4, 3)


def test_the_checksum_is_of_the_places_of_records(tmp_path):
    source = load(shards(tmp_path) + FEATURES).train
    assert source.checksum == load(shards(tmp_path) + FEATURES).train.checksum
    assert source.checksum != load(shards(tmp_path, (8,)) + FEATURES).train.checksum


def test_test_parts(tmp_path):
    pattern = shards(tmp_path)
    both = [
        load(f"{pattern}{FEATURES[:-1]}, validation_split=0.25)"),
        load(f'tfrecord:train-2.*{FEATURES[:-1]}, test="train-0.*")', data_dir=str(tmp_path)),
    ]
    assert [(found.train.size, found.test and found.test.size) for found in both] == [(6, 2), (5, 3)]
    x = np.concatenate([everything(part)[0] for part in (both[0].train, both[0].test)])
    np.testing.assert_array_equal(np.sort(x[:, 0, 0, 0] * 255).round(), np.arange(8))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("", "needs the features to read from each record.*has image/encoded, label"),
        ('(features="image/encoded:imag,label:int64")', "'imag'.*Did you mean \"image\""),
        ('(features="label:int64")', "at least two features"),
        ('(features="label:int64, label:int64")', "twice"),
        ('(features="a b, label:int64")', "features are comma-separated NAME:TYPE"),
        ('(features="image/encoded:uint8, label:int64")', "uint8 needs the shape"),
        ('(features="image/encoded:uint8[9], label:int64")', "as many bytes as its shape.*has 72|has \\d+ bytes"),
        (
            '(features="image/encode:image, label:int64")',
            r"'image/encode', but record 0 of .*train-0.tfrecord has image/encoded:string\[1\], label:int64\[1\]."
            ' Did you mean "image/encoded"',
        ),
        ('(features="image/encoded:image, label:float32")', "label:float32, but .*has label:int64"),
        ('(features="image/encoded:image, label:int64[2]")', r"label:int64\[2\], but .*has label:int64\[1\]"),
        ('(features="image/encoded:image, label:int64", label="lable")', 'Did you mean "label"'),
        ('(features="image/encoded:image, label:int64", test="a", validation_split=0.1)', "not both"),
    ],
)
def test_features_that_records_do_not_have_are_errors(tmp_path, arguments, says):
    with pytest.raises(InputError, match=says) as error:
        load(shards(tmp_path) + arguments)
    assert "\n" not in str(error.value)


def damaged(content: bytes, kind: str) -> bytes:
    (length,) = struct.unpack_from("<Q", content)
    second = 16 + length
    return {
        "text": b"no records, but some text",
        "gzip": gzip.compress(content, mtime=0),
        "cut": content[:-3],
        "header": content[: second + 2] + b"\x01" + content[second + 3 :],
        "empty": b"",
    }[kind]


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("text", "does not begin with a record"),
        ("gzip", "must not be compressed"),
        ("cut", "its last record, 2, is incomplete"),
        ("header", "the header of record 1 has a wrong checksum"),
        ("empty", "1 empty files"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path, kind, says):
    shards(tmp_path, (3,))
    path = tmp_path / "train-0.tfrecord"
    path.write_bytes(damaged(path.read_bytes(), kind))
    with pytest.raises(InputError, match=says) as error:
        load(f"tfrecord:{path}{FEATURES}")
    assert str(path) in str(error.value)


def test_no_file_is_an_error(tmp_path):
    with pytest.raises(InputError, match="there is no file train-\\*.tfrecord"):
        load(f"tfrecord:{tmp_path}/train-*.tfrecord{FEATURES}")


def test_a_later_record_is_explained_when_it_is_read(tmp_path):
    good = example(x=[1.0], y=0)
    path = write_records(tmp_path / "a.tfrecord", [good, good, example(x=[1.0, 2.0], y=0)])
    source = load(f'tfrecord:{path}(features="x:float32[1], y:int64")').train
    with pytest.raises(tf.errors.InvalidArgumentError):
        everything(source)
    assert "has x:float32[2]" in str(source.explain(ValueError())) and "record 2 of" in str(
        source.explain(ValueError())
    )
