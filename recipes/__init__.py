"""The recipes: a folder of configuration for each, and the model (gpt.py) and the data modules (text.py) that several use.

`lightning-holmes fit` finds these classes when it is run from the root of the repository.
"""
