"""Bit packing: a byte stores 8 signs, 4 ternary values, or 2 numbers of 4 bits.

A 5-bit number is stored as a 4-bit number and a bit. A byte holds 8 / w numbers of w bits: one from each of 8 / w
equal pieces of the vector rather than neighbors, so packing and unpacking are operations on whole pieces.
"""

import functools
from collections.abc import Callable, Sequence

import tensorflow as tf


def pack_bits(numbers: tf.Tensor, bits: int) -> tf.Tensor:
    """Packs numbers [n] uint8, each below 2**bits, into uint8: `bits` bytes for 8 numbers, rounded up, or [n] with 8 bits."""
    if bits == 8:
        return numbers
    numbers = tf.pad(numbers, [[0, -numbers.shape[0] % 8]])
    quarters = _quarters(numbers)
    return tf.concat([part for width, low in _widths(bits) for part in _join(quarters, width, low)], axis=0)


def unpack_bits(packed: tf.Tensor, size: int, bits: int) -> list[tf.Tensor]:
    """Returns `size` numbers in pieces, uint8 tensors whose concatenation is the vector.

    Apply further operations to the pieces and concatenate last: XLA then compiles each piece to one loop.
    """
    if bits == 8:
        return [packed]
    pieces = _unpack(packed, -(-size // 8) * 8, bits)
    length = pieces[0].shape[0]
    return [piece[: size - i * length] for i, piece in enumerate(pieces) if i * length < size]


def _widths(bits: int) -> list[tuple[int, int]]:
    """Splits a number of bits below 8 into power-of-two widths; returns each width with the position of its lowest bit."""
    widths, low = [], 0
    for width in (4, 2, 1):
        if bits & width:
            widths.append((width, low))
            low += width
    return widths


def _quarters(numbers: tf.Tensor) -> list[tf.Tensor]:
    """Splits numbers into four pieces by a reduction to words, which XLA computes once instead of once per width."""
    shifts = tf.constant([0, 8, 16, 24], tf.uint32)
    parts = tf.cast(tf.reshape(numbers, [4, -1]), tf.uint32)
    words = tf.reduce_sum(tf.bitwise.left_shift(parts, shifts[:, None]), axis=0)
    quarter_words = tf.unstack(tf.bitwise.right_shift(words, shifts[:, None]))
    return [tf.cast(tf.bitwise.bitwise_and(words, 255), tf.uint8) for words in quarter_words]


def _join(quarters: Sequence[tf.Tensor], width: int, low: int) -> list[tf.Tensor]:
    """Packs `width` bits of each number: byte i contains the bits of element i of every piece."""
    parts = 8 // width
    pieces = [piece for quarter in quarters for piece in tf.split(quarter, max(1, parts // 4))]
    groups = len(pieces) // parts
    packed = []
    for first in range(groups):
        fields = [_field(piece, width, low) for piece in pieces[first::groups]]
        shifted_fields = [
            _apply_shift(tf.bitwise.left_shift, field, width * index) for index, field in enumerate(fields)
        ]
        packed.append(functools.reduce(tf.bitwise.bitwise_or, shifted_fields))
    return packed


def _unpack(packed: tf.Tensor, size: int, bits: int) -> list[tf.Tensor]:
    """Returns 8 / w pieces of equal length, where w is the smallest width."""
    widths = _widths(bits)
    count = 8 // widths[-1][0]
    planes = tf.split(packed, [size * width // 8 for width, _ in widths])
    pieces = []
    for i in range(count):
        fields = []
        for plane, (width, low) in zip(planes, widths, strict=True):
            index, start = divmod(i * size // count, plane.shape[0])
            field = _field(plane[start : start + size // count], width, width * index)
            fields.append(_apply_shift(tf.bitwise.left_shift, field, low))
        pieces.append(functools.reduce(tf.bitwise.bitwise_or, fields))
    return pieces


def _field(numbers: tf.Tensor, width: int, low: int) -> tf.Tensor:
    return tf.bitwise.bitwise_and(
        _apply_shift(tf.bitwise.right_shift, numbers, low), tf.constant(2**width - 1, tf.uint8)
    )


def _apply_shift(shift: Callable[..., tf.Tensor], numbers: tf.Tensor, amount: int) -> tf.Tensor:
    return shift(numbers, tf.constant(amount, tf.uint8)) if amount else numbers
