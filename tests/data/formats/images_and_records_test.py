"""Folders of images, and TFRecord files."""

import gzip
import shutil
import struct

import numpy as np
import pytest
import tensorflow as tf

from tests.data.formats.writing import COLORS, example, write_image, write_records
from tests.data.reading import everything
from tfdist.data import Pipeline, load
from tfdist.errors import InputError


@pytest.fixture
def folder(tmp_path):
    """Twelve images of three classes, four each."""
    for name, channel in COLORS.items():
        for number in range(4):
            write_image(tmp_path / "colors" / name / f"{number}.png", channel, 10 * number)
    return tmp_path / "colors"


def test_folders_are_classes_in_sorted_order(folder):
    found = load(f"images:{folder}")
    assert (found.name, found.input_shape, found.classes) == (f"images:{folder}", (6, 8, 3), 3)
    assert found.class_names == ("blue", "green", "red")
    assert found.test is None and found.train.size == 12
    assert found.train.element_spec == (tf.TensorSpec([6, 8, 3], tf.float32), tf.TensorSpec([], tf.int32))
    x, y = everything(found.train)
    np.testing.assert_array_equal(y, np.repeat([0, 1, 2], 4))
    np.testing.assert_array_equal(x.max(axis=(1, 2)).argmax(axis=1), np.repeat([2, 1, 0], 4))
    np.testing.assert_allclose(x.max(axis=(1, 2, 3)), np.tile([255, 245, 235, 225], 3) / np.float32(255))


def test_the_checksum_is_of_the_names_in_the_folder(folder, tmp_path):
    source = load(f"images:{folder}").train
    shutil.copytree(folder, tmp_path / "copy")
    copy = load(f"images:{tmp_path}/copy").train
    assert source.checksum == copy.checksum == copy.map(lambda x, y: (x, y)).in_order().checksum
    (tmp_path / "copy" / "red" / "0.png").rename(tmp_path / "copy" / "red" / "9.png")
    assert load(f"images:{tmp_path}/copy").train.checksum != source.checksum


def test_a_path_with_spaces_is_an_argument(folder):
    folder.rename(folder.parent / "my colors")
    assert load('images(path="my colors")', data_dir=str(folder.parent)).train.size == 12


def test_train_and_test_folders_are_the_parts(tmp_path):
    for part, size in [("train", 3), ("val", 2)]:
        for number in range(size):
            write_image(tmp_path / part / "a" / "deep" / f"{number}.jpg", 0, 0)
            write_image(tmp_path / part / "b" / f"{number}.JPG".lower(), 1, 0)
    found = load(f"images:{tmp_path}")
    assert found.test and (found.train.size, found.test.size, found.class_names) == (6, 4, ("a", "b"))
    with pytest.raises(
        InputError, match="Test data and validation_split are mutually exclusive. Received: .*val and 0.5"
    ):
        load(f"images:{tmp_path}(validation_split=0.5)")
    (tmp_path / "test").mkdir()
    with pytest.raises(InputError, match=f"Received: {tmp_path / 'test'}, which has 0 images but no subfolders"):
        load(f"images:{tmp_path}")
    write_image(tmp_path / "test" / "bb" / "0.png", 0, 0)
    with pytest.raises(InputError, match='must have the classes of the training data.*Did you mean "b"'):
        load(f"images:{tmp_path}")


def test_validation_split_takes_the_same_share_of_each_class_every_time(folder):
    def parts():
        found = load(f"images:{folder}(validation_split=0.25)")
        assert found.test and (found.train.size, found.test.size) == (9, 3)
        return everything(found.train), everything(found.test)

    (train_x, train_y), (test_x, test_y) = parts()
    assert np.bincount(train_y).tolist() == [3, 3, 3] and np.bincount(test_y).tolist() == [1, 1, 1]
    assert len(np.unique(np.concatenate([train_x, test_x]), axis=0)) == 12
    tf.nest.map_structure(np.testing.assert_array_equal, parts(), ((train_x, train_y), (test_x, test_y)))


def test_images_are_resized_and_converted(tmp_path):
    write_image(tmp_path / "a" / "0.png", 0, 0, (6, 8))
    write_image(tmp_path / "b" / "0.jpg", 1, 0, (20, 10))
    found = load(f"images:{tmp_path}(size=(5, 7), channels=1)")
    assert found.input_shape == (5, 7, 1)
    x, _ = everything(found.train)
    assert x.dtype == np.float32 and np.ptp(x[0]) < 0.01  # of one color
    assert load(f"images:{tmp_path}(size=4)").input_shape == (4, 4, 3)


def test_a_crop_keeps_the_aspect_ratio(tmp_path):
    pixels = np.zeros((4, 12, 3), np.uint8)
    pixels[:, 4:8] = 255  # only the middle third is white
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "0.png").write_bytes(tf.io.encode_png(pixels).numpy())
    x, _ = everything(load(f"images:{tmp_path}(size=4, crop_to_aspect_ratio=True)").train)
    np.testing.assert_array_equal(x, np.ones((1, 4, 4, 3)))
    x, _ = everything(load(f"images:{tmp_path}(size=4)").train)
    assert x.min() == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("(size=0)", "size must be a positive number of pixels"),
        ('(size="big")', "size must be"),
        ("(channels=2)", "channels must be 1"),
        ("(validation_split=1.5)", r"fraction in \[0, 1\)"),
        ("(validation_split=0.01)", "must leave examples for training and test"),
        ("(sise=3)", 'Did you mean "size"'),
    ],
)
def test_invalid_arguments_are_errors(folder, arguments, says):
    with pytest.raises(InputError, match=says):
        load(f"images:{folder}{arguments}")


def test_a_folder_that_cannot_be_used_is_named(folder, tmp_path):
    with pytest.raises(InputError, match=r'colours; there is no folder colours in .*Did you mean "colors"'):
        load(f"images:{tmp_path}/colours")
    with pytest.raises(InputError, match="red, which has 4 images but no subfolders. Move the images"):
        load(f"images:{folder}/red")
    for name in ("a", "b"):
        (folder / "red" / name).symlink_to(folder)  # which have 2 ** 40 folders
    assert load(f"images:{folder}/red(labels=False)").train.size == 12
    (folder / "yellow").mkdir()
    (folder / "yellow" / "notes.txt").write_text("none yet")
    with pytest.raises(InputError, match="Received: .*yellow, which has no images"):
        load(f"images:{folder}")


@pytest.mark.parametrize("content", [b"", b"no image", "half"])
def test_a_first_image_that_cannot_be_decoded_is_named_before_training(folder, content):
    path = folder / "green" / "0.png"
    path.write_bytes(path.read_bytes()[:40] if content == "half" else content)
    with pytest.raises(InputError, match=f"{path}, which cannot be decoded: ") as error:
        load(f"images:{folder}")
    assert "\n" not in str(error.value)


def test_a_later_image_is_explained_when_it_is_read(folder):
    source = load(f"images:{folder}").train
    assert source.explain(ValueError()) is None
    write_image(folder / "red" / "2.png", 0, 0, (9, 9))
    message = str(source.explain(ValueError()))
    assert f"{folder / 'red' / '2.png'} of 9 x 9 pixels, and others of 6 x 8" in message
    (folder / "green" / "3.png").unlink()
    assert "green/3.png: No such file" in str(source.map(lambda x, y: (x, y)).explain(ValueError()))


def test_images_without_classes(folder):
    found = load(f"images:{folder}(labels=False)")
    assert found.test is found.train and (found.classes, found.input_shape, found.train.size) == (None, (6, 8, 3), 12)
    x, y = everything(found.train)
    labelled = load(f"images:{folder}")
    np.testing.assert_array_equal(x, everything(labelled.train)[0])
    assert y == () and found.train.origins == labelled.train.origins
    assert found.train.origins.names[:2] == ["blue/0.png", "blue/1.png"]
    for path in folder.rglob("*.png"):
        path.unlink()
    with pytest.raises(InputError, match="must contain images .*which has no images"):
        load(f"images:{folder}(labels=False)")


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
        ('(features="image/encoded:imag,label:int64")', "Received: 'image/encoded:imag' in .*Did you mean \"image\""),
        ('(features="label:int64")', "at least two distinct, .* Received: features='label:int64'"),
        ('(features="label:int64, label:int64")', "distinct, .* Received: 'label:int64' in"),
        ('(features="a b, label:int64")', "features must be at least two distinct, comma-separated NAME:TYPE"),
        ('(features="image/encoded:uint8, label:int64")', "Received: 'image/encoded:uint8' in"),
        ('(features="image/encoded:image[9], label:int64")', r"Received: 'image/encoded:image\[9\]' in"),
        ('(features="image/encoded:uint8[0], label:int64")', r"Received: 'image/encoded:uint8\[0\]' in"),
        ('(features="image/encoded:uint8[9], label:int64")', r"encoded:uint8\[9\], but .*encoded:uint8\[\d\d+\]"),
        (
            '(features="image/encode:image, label:int64")',
            r"image/encode:image, but record 0 of .*train-0.tfrecord has image/encoded:string\[1\], label:int64\[1\]."
            ' Did you mean "image/encoded"',
        ),
        ('(features="image/encoded:image, label:float32")', r"label:float32, but .*label:int64\[1\]"),
        ('(features="image/encoded:image, label:int64[2]")', r"label:int64\[2\], but .*label:int64\[1\]"),
        ('(features="image/encoded:image, label:int64", label="lable")', 'Did you mean "label"'),
        ('(features="image/encoded:image, label:int64", test="a", validation_split=0.1)', "mutually exclusive"),
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
        ("text", "complete and uncompressed, .* in which the end of record 0 is missing"),
        ("gzip", "complete and uncompressed, .* in which the end of record 0 is missing"),
        ("cut", "in which the end of record 2 is missing"),
        ("header", "in which the end of record 1 is missing"),
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
    message = str(source.explain(ValueError()))
    assert "has x:float32[2]" in message and "record 2 of" in message
