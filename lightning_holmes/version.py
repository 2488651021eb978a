"""The version of this package, as installed."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("lightning-holmes")
except PackageNotFoundError:  # run from a source tree without installation
    __version__ = "0+unknown"
