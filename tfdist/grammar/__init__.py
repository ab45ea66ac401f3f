"""Parsers for flag values: compound values, rules for variables, intervals, learning-rate decays, the user's own code.

Pure Python. `tfdist.config` defines which flag uses which grammar. `sync` and `decay` also list the names
that their flags accept; names of models, data sets, compression methods and loggers are in the packages that implement them.
"""
