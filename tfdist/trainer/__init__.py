"""`Trainer`, which binds a Keras model to its optimizer and strategy, the fit loop, and the inspections between its steps.

A `Program` is the built model with its compiled functions, `FitLoop` a call of `fit`, and `TrainState` what is saved besides
variables. The compiled step is in `tfdist.step`; Keras's own `fit` on replicas is in `tfdist.keras_fit`.
"""
