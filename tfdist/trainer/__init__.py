"""`Trainer`: one Keras model, its optimizer and its strategy; and the fit loop.

The step that it compiles is in `tfdist.step`. Keras's own `fit` on replicas is `tfdist.keras_fit`.
"""
