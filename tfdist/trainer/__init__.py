"""`Trainer`, which binds a Keras model to its optimizer and strategy, and the fit loop.

The compiled training step is in `tfdist.step`; Keras's own `fit` on replicas is in `tfdist.keras_fit`.
"""
