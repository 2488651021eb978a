"""``lightning_holmes.check``: compare a module in plain Lightning with the same module as a pipeline, in one process."""
