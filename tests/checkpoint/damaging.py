"""Damage to files, as a failing disk does it."""

import pathlib


def flip_last(path: pathlib.Path) -> None:
    """Flips a bit of the last byte."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
