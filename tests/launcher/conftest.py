import pathlib
from collections.abc import Iterator

import pytest

from tests.launcher.launching import Launches


@pytest.fixture
def launch(tmp_path: pathlib.Path) -> Iterator[Launches]:
    """Starts launchers, of which none may leave a process behind."""
    with Launches(tmp_path) as launches:
        yield launches
