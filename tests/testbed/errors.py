"""The exceptions of a testbed."""

from lightning_holmes.errors import HolmesError


class TestbedError(HolmesError, RuntimeError):
    """An error on a testbed: a host is missing, or a command failed."""

    __test__ = False  # pytest would take the class for a test because of its name


class TestbedUnavailable(TestbedError):
    """This machine cannot run a testbed. The message says which capability is missing."""
