import functools

import numpy as np
import pytest
import tensorflow as tf

from tests.data.reading import everything
from tests.selection import quick
from tfdist.data import ArraySource, Pipeline, StreamSource, augmented
from tfdist.data.augmentations import RowRandom, parse_augmentations
from tfdist.errors import InputError

ALL = (
    "flip|crop(padding=2)|brightness|contrast(delta=0.5)|cutout(size=3)|erase(probability=1)|rotate(degrees=30)"
    "|resized_crop|flip(axis='vertical')"
)


@functools.cache
def images(kind="source", size=10):
    x = np.random.default_rng(0).random((size, 8, 6, 3)).astype("float32")
    arrays = (x, np.arange(size))
    return ArraySource(arrays) if kind == "source" else StreamSource(tf.data.Dataset.from_tensor_slices(arrays), 5)


def global_batches(source, steps, processes=((0,),), batch_size=4, first=0, seed=7):
    """Returns x and y of each step, put together from the rows of all replicas."""
    replicas = sum(map(len, processes))
    shares = {}
    for local in processes:
        pipeline = Pipeline(source, batch_size, seed, first).dataset(local, replicas)
        for place, element in enumerate(pipeline.take(steps * len(local)).as_numpy_iterator()):
            shares[place // len(local), local[place % len(local)]] = element
    return [
        tuple(np.concatenate([shares[step, replica][part] for replica in range(replicas)]) for part in (0, 1))
        for step in range(steps)
    ]


def assert_same(found, expected):
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        for left, right in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize(("kind", "processes"), [("source", ((0,), (1,))), ("stream", ((0, 1), (2,)))])
def test_batches_do_not_depend_on_the_replicas(kind, processes):
    source = augmented(images(kind), ALL)
    assert_same(global_batches(source, 6, processes), global_batches(source, 6))


@pytest.mark.parametrize("kind", quick(["source", "stream"], "source"))
def test_a_run_that_begins_later_has_the_same_batches(kind):
    source = augmented(images(kind), ALL)
    assert_same(global_batches(source, 4, first=8), global_batches(source, 6)[2:])


def test_an_example_gets_the_same_change_whatever_the_batch_size():
    def of_first_epoch(batch_size):
        batches = global_batches(augmented(images(), ALL), 10 // batch_size, batch_size=batch_size)
        x, y = (np.concatenate(part) for part in zip(*batches, strict=True))
        return x[np.argsort(y)]

    np.testing.assert_array_equal(of_first_epoch(2), of_first_epoch(5))


def test_changes_depend_on_the_epoch_the_example_and_the_seed():
    source = augmented(images(size=5), "crop(padding=3)")
    epochs = [x[np.argsort(y)] for x, y in global_batches(source, 2, batch_size=5)]
    assert (epochs[0] != epochs[1]).any()
    other = [x[np.argsort(y)] for x, y in global_batches(source, 1, batch_size=5, seed=8)]
    assert (epochs[0] != other[0]).any()


def test_evaluation_is_not_augmented_and_labels_stay():
    source = augmented(images(), ALL)
    assert source.element_spec == images().element_spec and source.size == 10
    (x, y), (plain, numbers) = everything(source), everything(images())
    np.testing.assert_array_equal(x, plain)
    np.testing.assert_array_equal(y, numbers)
    assert augmented(images(), "") is images()


def test_the_order_may_be_the_natural_one():
    source = augmented(images(), "crop").in_order()
    batches = global_batches(source, 5)
    assert np.concatenate([y for _, y in batches]).tolist() == [*range(10)] * 2
    assert (batches[0][0] != everything(images())[0][:4]).any()
    assert source.sample.element_spec == images().element_spec and source.checksum == images().checksum


def test_a_transform_is_applied_after_the_augmentation():
    source = augmented(images(), "flip").map(lambda x, y: (2 * x, y))
    assert_same(global_batches(source, 2), [(2 * x, y) for x, y in global_batches(augmented(images(), "flip"), 2)])
    assert source.element_spec == images().element_spec


def changed(chain, x, rows=200):
    """Applies a chain to many copies of one image."""
    batch = tf.tile(tf.constant(x, tf.float32)[None], [rows, 1, 1, 1])
    for stream, augmentation in enumerate(parse_augmentations(chain)):
        batch = augmentation(batch, RowRandom(tf.range(rows, dtype=tf.int64), 3, stream))
    return batch.numpy()


RAMP = np.arange(1.0, 31).reshape(5, 6, 1)


def test_flip():
    found = changed("flip", RAMP)
    flipped = (found == RAMP[:, ::-1]).all(axis=(1, 2, 3))
    assert ((found == RAMP).all(axis=(1, 2, 3)) ^ flipped).all()
    assert 70 < flipped.sum() < 130
    np.testing.assert_array_equal(changed("flip(axis='vertical', probability=1)", RAMP)[0], RAMP[::-1])


def test_crop_moves_by_whole_pixels_in_all_directions():
    found = changed("crop(padding=1)", RAMP)
    padded = np.pad(RAMP, ((1, 1), (1, 1), (0, 0)))
    moved = [padded[i : i + 5, j : j + 6] for i in range(3) for j in range(3)]
    counts = [(found == one).all(axis=(1, 2, 3)).sum() for one in moved]
    assert sum(counts) == 200 and min(counts) > 8


def test_brightness_and_contrast_stay_in_range():
    gray = np.full((2, 2, 1), 0.4)
    found = changed("brightness(delta=0.1)", gray)
    assert 0.3 <= found.min() < 0.32 and 0.48 < found.max() <= 0.5
    both = np.array([[[0.4], [1.0]]])
    found = changed("contrast(delta=0.5)", both)
    assert found.max() == 1 and 0.35 <= found[:, 0, 0].min() < 0.36 and 0.44 < found[:, 0, 0].max() <= 0.45


def test_cutout_and_erase_set_rectangles_to_zero():
    ones = np.ones((9, 9, 2))
    zeros = (changed("cutout(size=3)", ones) == 0).sum(axis=(1, 2, 3)) // 2
    assert set(zeros) == {4, 6, 9}
    found = changed("erase(probability=0.25, scale=(0.1, 0.3))", ones)
    zeros = (found == 0).all(axis=3).sum(axis=(1, 2))
    assert 30 < (zeros > 0).sum() < 70
    assert 4 <= zeros[zeros > 0].min() and zeros.max() <= 36
    for image in found[zeros > 0]:
        rows, columns = (image[..., 0] == 0).any(axis=1), (image[..., 0] == 0).any(axis=0)
        assert (image[..., 0] == 0).sum() == rows.sum() * columns.sum()


def test_rotate_turns_around_the_center():
    image = np.zeros((9, 9, 1))
    image[4] = 1
    found = changed("rotate(degrees=90)", image)
    np.testing.assert_allclose(found[:, 4, 4, 0], 1, atol=1e-5)
    assert found[:, 0, 4, 0].max() > 0.8 and found[:, 4, 0, 0].max() > 0.8


def test_resized_crop_shows_a_part():
    found = changed("resized_crop(scale=(0.25, 0.25), ratio=(1, 1))", np.arange(64.0).reshape(8, 8, 1) / 64)
    spread = np.ptp(found, axis=(1, 2, 3))
    assert 0.3 < spread.min() and spread.max() < 0.6
    np.testing.assert_allclose(changed("resized_crop(scale=(1, 1), ratio=(1, 1))", RAMP)[0], RAMP, rtol=1e-6)


def test_the_ratios_of_resized_crops_are_uniform_in_their_logarithm():
    rows, columns = np.meshgrid(np.arange(64.0), np.arange(64.0), indexing="ij")
    found = changed("resized_crop(scale=(0.04, 0.04), ratio=(0.5, 2))", np.stack([rows, columns], axis=-1))
    heights, widths = np.ptp(found, axis=(1, 2)).T
    ratios = np.log2(widths / heights)
    assert -1.01 < ratios.min() < -0.9 and 0.9 < ratios.max() < 1.01 and abs(ratios.mean()) < 0.2
    np.testing.assert_allclose(heights * widths, 0.04 * 63**2, rtol=1e-3)


def test_random_numbers_are_uniform_and_independent_in_each_stream():
    places = tf.range(20000, dtype=tf.int64)
    found = np.concatenate([RowRandom(places, 1, stream).uniform(2).numpy() for stream in (0, 1)], axis=1)
    assert found.min() >= 0 and found.max() < 1
    np.testing.assert_allclose(np.histogram(found, 10, (0, 1))[0], 8000, rtol=0.05)
    correlation = np.corrcoef(np.concatenate([found, np.roll(found, 1, axis=0)], axis=1), rowvar=False)
    np.testing.assert_allclose(correlation, np.eye(8), atol=0.03)


def shifted(images, random, by=0.0):
    noise = tf.map_fn(
        lambda seed: tf.random.stateless_uniform(images.shape[1:], seed), random.seeds, fn_output_signature=tf.float32
    )
    return images + by + noise


def test_a_users_own_function():
    own = f"{__name__}:shifted(by=10)"
    source = augmented(images(), f"{own}|flip")
    [(x, _)] = global_batches(source, 1)
    assert x.min() > 10
    assert_same(global_batches(source, 3, ((0, 1),)), global_batches(source, 3))
    assert_same(*(global_batches(augmented(images(), chain), 1) for chain in ([shifted], f"{__name__}:shifted")))


@pytest.mark.parametrize(
    ("chain", "says"),
    [
        ("flop", r'^augment=flop is not known. Did you mean "flip"\? Known: brightness'),
        ("flip|", "specs with | between them"),
        ("flip(axis='diagonal')", "horizontal or vertical"),
        ("flip(probability=2)", r"in \[0, 1\]"),
        ("crop(padding=0)", "integer of at least 1"),
        ("crop(pading=1)", 'Did you mean "padding"'),
        ("rotate(degrees=0)", "degrees"),
        ("rotate(degrees=True)", r"in \(0, 180\]. Received: True"),
        ("resized_crop(scale=(0, 1))", "both positive and at most 1"),
        ("erase(ratio=3)", "smallest, largest"),
        ("brightness(delta='much')", "delta"),
        ("numpy:nothing_of_that_name", "nothing_of_that_name"),
        (f"{__name__}:shifted(to=1)", 'no parameter "to"'),
    ],
)
def test_what_is_no_augmentation_is_an_error(chain, says):
    with pytest.raises(InputError, match=says) as error:
        augmented(images(), chain)
    assert "\n" not in str(error.value)


def test_data_that_has_no_images_is_an_error():
    with pytest.raises(InputError, match=r"Received: x of float32\[\]"):
        augmented(ArraySource((np.zeros(3), np.zeros(3))), "flip")
    with pytest.raises(InputError, match="Received: x of dict"):
        augmented(ArraySource(({"a": np.zeros(3)}, np.zeros(3))), "flip")
    with pytest.raises(InputError, match="keep shape and dtype.*augmentation 1"):
        augmented(images(), [lambda x, random: x[:, 1:]])
