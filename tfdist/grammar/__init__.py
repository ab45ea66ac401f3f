"""The text that users write in flags: compound values, rules for variables, intervals, learning-rate decays, their own code.

Pure Python. Which flag has which grammar is said in `tfdist.config`; what a name stands for, in the package that has the thing.
"""
