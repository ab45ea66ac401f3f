"""A folder of images that tests share."""

import pytest

from tests.data.formats.writing import COLORS, write_image


@pytest.fixture
def folder(tmp_path):
    """Twelve images of three classes, four each."""
    for name, channel in COLORS.items():
        for number in range(4):
            write_image(tmp_path / "colors" / name / f"{number}.png", channel, 10 * number)
    return tmp_path / "colors"
