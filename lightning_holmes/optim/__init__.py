"""Gradient buffers, gradient synchronisation, clipping, and sharded and remote optimizers."""
