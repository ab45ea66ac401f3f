"""Random changes of training images, as a pure function of (seed, epoch, example).

The same example gets the same change in the same epoch on any number of replicas, and after a resume. An augmentation is
a function of a batch of images and of `RowRandom`, which has random numbers for each row.
"""

from tfdist.data.augmentation.augmented import Augmented, augmented
from tfdist.data.augmentation.catalog import Augmentation, parse_augmentations
from tfdist.data.augmentation.row_random import RowRandom

__all__ = ["Augmentation", "Augmented", "RowRandom", "augmented", "parse_augmentations"]
