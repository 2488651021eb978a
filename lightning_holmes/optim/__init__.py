"""How weights change: gradient buffers, their synchronisation, clipping."""
