"""Bit packing: 8 signs per byte, 4 ternary values, or 2 numbers of 4 bits.

A number of 5 bits is stored as one of 4 bits and one of 1. A byte holds 8 / w numbers of w bits, which are not
neighbors but one from each of 8 / w equal pieces of the vector, so that packing and unpacking are operations between
whole pieces.
"""

import functools
from collections.abc import Callable, Sequence

import tensorflow as tf


def packed_length(size: int, bits: int) -> int:
    """Returns the bytes needed for `size` numbers: `bits` per 8 numbers, rounded up; with 8 bits, one per number."""
    return size if bits == 8 else -(-size // 8) * bits


def pack_bits(numbers: tf.Tensor, bits: int) -> tf.Tensor:
    """Packs numbers into bytes.

    Args:
      numbers: [n] uint8, each below 2**bits.
      bits: 1 to 8.

    Returns:
      [packed_length(n, bits)] uint8.
    """
    if bits == 8:
        return numbers
    multiple = numbers.shape[0] // 8 * 8
    groups = [numbers[:multiple]] if multiple else []
    if multiple < numbers.shape[0]:
        groups.append(tf.pad(numbers[multiple:], [[0, multiple + 8 - numbers.shape[0]]]))
    packed = [part for group in groups for part in _packed(group, bits)]
    return packed[0] if len(packed) == 1 else tf.concat(packed, axis=0)


def unpack_bits(packed: tf.Tensor, size: int, bits: int) -> list[tf.Tensor]:
    """Returns `size` numbers in pieces, uint8 tensors whose concatenation is the vector.

    Apply further operations to the pieces and concatenate last, so that XLA compiles each piece to one loop.
    """
    if bits == 8:
        return [packed]
    multiple = size // 8 * 8
    split = packed_length(multiple, bits)
    pieces = _unpacked(packed[:split], multiple, bits) if multiple else []
    if multiple < size:
        pieces.append(tf.concat(_unpacked(packed[split:], 8, bits), axis=0)[: size - multiple])
    return pieces


def in_pieces(function: Callable[..., tf.Tensor], pieces: Sequence[tf.Tensor], *vectors: tf.Tensor) -> list[tf.Tensor]:
    """Calls an elementwise function with each piece and the corresponding part of each vector."""
    results, start = [], 0
    for piece in pieces:
        end = start + piece.shape[0]
        results.append(function(piece, *(vector[start:end] for vector in vectors)))
        start = end
    return results


def _widths(bits: int) -> list[tuple[int, int]]:
    """Returns the widths, powers of two, into which a number below 8 bits is split, and the lowest bit of each."""
    widths, low = [], 0
    for width in (4, 2, 1):
        if bits & width:
            widths.append((width, low))
            low += width
    return widths


def _packed(numbers: tf.Tensor, bits: int) -> list[tf.Tensor]:
    """Packs a multiple of 8 numbers: for each width, byte i contains number i of every part."""
    quarters = _quarters(numbers)
    return [packed for width, low in _widths(bits) for packed in _joined(quarters, width, low)]


def _quarters(numbers: tf.Tensor) -> list[tf.Tensor]:
    """Splits numbers into four pieces via a reduction to words, so that XLA computes them once and not per width."""
    shifts = tf.constant([0, 8, 16, 24], tf.uint32)
    parts = tf.cast(tf.reshape(numbers, [4, -1]), tf.uint32)
    words = tf.reduce_sum(tf.bitwise.left_shift(parts, shifts[:, None]), axis=0)
    shifted = tf.unstack(tf.bitwise.right_shift(words, shifts[:, None]))
    return [tf.cast(tf.bitwise.bitwise_and(words, 255), tf.uint8) for words in shifted]


def _joined(quarters: Sequence[tf.Tensor], width: int, low: int) -> list[tf.Tensor]:
    parts = 8 // width
    pieces = [piece for quarter in quarters for piece in tf.split(quarter, max(1, parts // 4))]
    groups = len(pieces) // parts
    joined = []
    for first in range(groups):
        fields = [_field(piece, width, low) for piece in pieces[first::groups]]
        shifted = [_shifted(tf.bitwise.left_shift, field, width * index) for index, field in enumerate(fields)]
        joined.append(functools.reduce(tf.bitwise.bitwise_or, shifted))
    return joined


def _unpacked(packed: tf.Tensor, size: int, bits: int) -> list[tf.Tensor]:
    """Returns as many equal pieces as a byte holds numbers of the smallest width."""
    widths = _widths(bits)
    count = 8 // widths[-1][0]
    planes = tf.split(packed, [size * width // 8 for width, _ in widths])
    pieces = []
    for i in range(count):
        fields = []
        for plane, (width, low) in zip(planes, widths, strict=True):
            index, start = divmod(i * size // count, plane.shape[0])
            field = _field(plane[start : start + size // count], width, width * index)
            fields.append(_shifted(tf.bitwise.left_shift, field, low))
        pieces.append(functools.reduce(tf.bitwise.bitwise_or, fields))
    return pieces


def _field(numbers: tf.Tensor, width: int, low: int) -> tf.Tensor:
    return tf.bitwise.bitwise_and(_shifted(tf.bitwise.right_shift, numbers, low), tf.constant(2**width - 1, tf.uint8))


def _shifted(shift: Callable[..., tf.Tensor], numbers: tf.Tensor, by: int) -> tf.Tensor:
    return shift(numbers, tf.constant(by, tf.uint8)) if by else numbers
