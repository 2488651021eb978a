"""Adapters that keep Lightning's callbacks, metrics and signal handling correct while ranks hold parts of a module."""
