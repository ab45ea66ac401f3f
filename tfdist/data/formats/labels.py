"""Labels of classes: names or numbers in files, numbered from 0."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tfdist.errors import InputError
from tfdist.grammar.spec import nearest

_MOST = 10_000  # more different labels are hardly classes


class ClassLabels(NamedTuple):
    """The classes of a data set.

    Attributes:
      names: names in the order of their numbers.
    """

    names: tuple[str, ...]

    def numbers(self, values: Sequence[str], where: str) -> np.ndarray:
        """Returns the number of each label's class, int32 [n].

        Args:
          values: names of classes.
          where: where they are from, for the error.

        Raises:
          InputError: a name is not that of a class.
        """
        number_of = {name: number for number, name in enumerate(self.names)}
        for value in values:
            if value not in number_of:
                raise InputError(
                    f"Every label must be one of the training data. Received: {value!r} in {where}."
                    f"{nearest(str(value), self.names[:20])}"
                )
        return np.array([number_of[value] for value in values], np.int32)


def class_labels(values: Sequence[str], where: str) -> ClassLabels:
    """Returns the classes: the different values, numbers by size and names by their characters.

    Args:
      values: label of each training example.
      where: where they are from, for the error.

    Raises:
      InputError: there are too many.
    """
    different = set(values)
    if len(different) > _MOST:
        raise InputError(
            f"A label must be one of at most {_MOST} classes. Received: {len(different)} different values in {where}. "
            "For numbers to predict, add regression=True."
        )
    try:
        return ClassLabels(tuple(sorted(different, key=lambda value: (int(value), value))))
    except ValueError:
        return ClassLabels(tuple(sorted(different)))
