"""`Trainer`, which binds a Keras model to its optimizer and strategy, the fit loop, and the inspections between its steps.

The compiled training step is in `tfdist.step`; Keras's own `fit` on replicas is in `tfdist.keras_fit`.
"""
