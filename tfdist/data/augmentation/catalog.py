"""Augmentations by name, and chains of them: `flip|crop(padding=4)`."""

from collections.abc import Callable

import tensorflow as tf

from tfdist.data.augmentation.arguments import Augmentation
from tfdist.data.augmentation.color import brightness, contrast
from tfdist.data.augmentation.erasing import cutout, erase
from tfdist.data.augmentation.geometric import crop, flip, resized_crop, rotate
from tfdist.data.augmentation.row_random import RowRandom
from tfdist.errors import InputError
from tfdist.grammar.chain import parse_chain
from tfdist.grammar.spec import Spec, call, load_object, nearest
from tfdist.grammar.user_code import call_own

AUGMENTATIONS: dict[str, Callable[..., Augmentation]] = {
    "brightness": brightness,
    "contrast": contrast,
    "crop": crop,
    "cutout": cutout,
    "erase": erase,
    "flip": flip,
    "resized_crop": resized_crop,
    "rotate": rotate,
}


def parse_augmentations(text: str) -> tuple[Augmentation, ...]:
    """Returns the augmentations of a chain, in order.

    Args:
      text: names with `|` between them, each optionally with arguments, or a user-defined `package.module:function`,
        which is called with `images`, `random` and its arguments, and returns images.

    Raises:
      InputError: a name is unknown, or its arguments are invalid.
    """
    return tuple(map(_augmentation, parse_chain(text)))


def _augmentation(spec: Spec) -> Augmentation:
    if spec.name in AUGMENTATIONS:
        return call(AUGMENTATIONS[spec.name], spec)
    if ":" in spec.name:
        return _own(spec)
    raise InputError(f"--augment={spec.name} is not known.{nearest(spec.name, AUGMENTATIONS)}")


def _own(spec: Spec) -> Augmentation:
    function = load_object(spec.name)

    def apply(images: tf.Tensor, random: RowRandom) -> tf.Tensor:
        return tf.convert_to_tensor(call_own("--augment", function, spec, images=images, random=random))

    return apply
