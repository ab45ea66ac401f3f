"""Parsers for flag values: compound values, rules for variables, intervals, learning-rate decays, the user's own code.

Pure Python. `tfdist.config` defines which flag uses which grammar; the package that implements a feature defines its
names.
"""
