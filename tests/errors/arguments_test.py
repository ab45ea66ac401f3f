"""Errors of the library name arguments; those of commands name flags."""

import pytest

from tfdist.errors import InputError, names_arguments, naming_flags


@names_arguments
def wrong(message):
    raise InputError(message)


@pytest.mark.parametrize(
    ("flags", "arguments"),
    [
        ("--batch_size must be at least 1. Received: 0.", "batch_size must be at least 1. Received: 0."),
        ("Received: --a=1 and --b. Use --a=2.", "Received: a=1 and b. Use a=2."),
        ("Run `tfdist install_horovod --mpi`.", "Run `tfdist install_horovod --mpi`."),
        ("a--b -- c", "a--b -- c"),
    ],
)
def test_flags_become_arguments_except_in_a_command(flags, arguments):
    with pytest.raises(InputError) as caught:
        wrong(flags)
    assert str(caught.value) == arguments
    with naming_flags(), pytest.raises(InputError) as caught:
        wrong(flags)
    assert str(caught.value) == flags
