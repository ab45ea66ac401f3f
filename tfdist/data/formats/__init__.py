"""Data sets that are a user's own files: a folder of images, CSV, NumPy archives, TFRecord shards.

Each format is a function that returns a `DataSet` whose parts have random access, so that the order is a true shuffle and
a run resumes without reading what it has used. Nothing is downloaded, and nothing is written next to the files.
"""
