import json
from typing import Any

import numpy as np
import pytest

from tfdist.data import EvaluationPipeline, Pipeline, StreamSource, catalog, load
from tfdist.errors import InputError


@pytest.fixture(scope="session")
def builders():
    """Builders of tensorflow-datasets: one dataset of images, and three that cannot be used."""
    tensorflow_datasets = pytest.importorskip("tensorflow_datasets")
    core, features = tensorflow_datasets.core, tensorflow_datasets.features
    base: Any = core.GeneratorBasedBuilder

    class Tiles(base):
        VERSION = core.Version("1.0.0")
        SHAPE: tuple[int | None, ...] = (4, 4, 1)
        KEYS: tuple[str, str] | None = ("image", "label")
        SPLITS = {"train": 12, "test": 5}

        def _info(self):
            parts = {"image": features.Image(shape=self.SHAPE), "label": features.ClassLabel(num_classes=3)}
            return core.DatasetInfo(builder=self, features=features.FeaturesDict(parts), supervised_keys=self.KEYS)

        def _split_generators(self, dl_manager):
            return {name: self._generate_examples(size) for name, size in self.SPLITS.items()}

        def _generate_examples(self, size):
            for i in range(size):
                yield i, {"image": np.full((4, 4, 1), 10 * i, np.uint8), "label": i % 3}

    class Bare(Tiles):
        KEYS = None

    class Ragged(Tiles):
        SHAPE = (None, None, 1)

    class Trainless(Tiles):
        SPLITS = {"test": 2}

    return Tiles, Bare, Ragged, Trainless


@pytest.fixture(scope="session")
def folder(builders, tmp_path_factory):
    path = tmp_path_factory.mktemp("tfds")
    for builder in builders:
        builder(data_dir=str(path)).download_and_prepare()
    return path


def test_a_prepared_dataset_is_a_stream_of_scaled_images(folder):
    found = load("tfds:tiles", data_dir=str(folder))
    assert (found.name, found.input_shape, found.classes) == ("tfds:tiles", (4, 4, 1), 3)
    assert isinstance(found.train, StreamSource)
    assert found.test and (found.train.size, found.test.size) == (12, 5)
    [((x, y), *_)] = EvaluationPipeline(found.test, 5).dataset([0], 1).as_numpy_iterator()
    assert x.dtype == np.float32
    np.testing.assert_allclose(np.sort(x[:, 0, 0, 0]), np.arange(5) * np.float32(10) / 255)
    np.testing.assert_array_equal(y, np.round(x[:, 0, 0, 0] * 25.5) % 3)


def test_training_order_repeats(folder):
    def labels():
        source = load("tfds:tiles:1.0.0", data_dir=str(folder)).train
        return [y.tolist() for _, y in Pipeline(source, 5, seed=0).dataset([0], 1).take(6).as_numpy_iterator()]

    assert labels() == labels()


def test_the_folder_may_come_from_the_environment(folder, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(folder))
    assert load("tfds:tiles").train.size == 12


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tfds:bare", r"must have \(input, label\) pairs. Received: supervised_keys=None"),
        ("tfds:ragged", r"must all have the same shape. Received: \(None, None, 1\).*package.module:function"),
        ("tfds:trainless", "must have a train split. Received: test"),
        ("tfds:tiles:2.0.0", "has tiles/1.0.0.*`tfds build tiles --data_dir="),
        ("tfds:mnist", "has no dataset of that name.*`tfds build mnist --data_dir="),
    ],
)
def test_what_cannot_be_used_is_an_error(folder, name, says):
    with pytest.raises(InputError, match=says):
        load(name, data_dir=str(folder))


def prepare(folder, *names):
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "dataset_info.json").write_text(json.dumps({}))


def test_the_newest_version_of_a_config_is_taken(tmp_path):
    prepare(tmp_path, "a/9.0.0", "a/10.0.0", "b/x/1.0.0", "b/y/1.0.0", "b/y/2.0.0", "a/10.0.0.incompleteXYZ")
    assert catalog._find_version("a", tmp_path) == tmp_path / "a/10.0.0"
    assert catalog._find_version("a:9.0.0", tmp_path) == tmp_path / "a/9.0.0"
    assert catalog._find_version("b/y", tmp_path) == tmp_path / "b/y/2.0.0"
    with pytest.raises(InputError, match="Use one of tfds:b/x, tfds:b/y"):
        catalog._find_version("b", tmp_path)


@pytest.mark.parametrize("name", ["", "../a", "/a", ".", "a/../b"])
def test_a_name_does_not_leave_the_folder(tmp_path, name):
    prepare(tmp_path, "a/1.0.0", "in/b/1.0.0")
    with pytest.raises(InputError, match="followed by NAME or NAME/CONFIG"):
        catalog._find_version(name, tmp_path / "in")
