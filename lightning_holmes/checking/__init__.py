"""``lightning_holmes.check``: a module in plain Lightning and as a pipeline, compared in one process."""
