"""Searches for the learning rate and the batch size of a run, which leave no trace in it.

`learning_rate` tries rates on a trainer and restores it, `batch_size` tries sizes in processes of their own. What is
written about them is here too; which flags a trial has, and where files are written, is decided by the commands.
"""
