"""Small reference models, each a function that returns a plain Keras model with logits, and their catalog.

User-defined models do not need this package: `--model=package.module:function`.
"""

from tfdist.models.catalog import NAMES, build, cnn, mlp, resnet50, transformer, with_batch_norm, zero_gradient_patterns

__all__ = ["NAMES", "build", "cnn", "mlp", "resnet50", "transformer", "with_batch_norm", "zero_gradient_patterns"]
