"""How bytes move: process groups, the edges of a pipeline, and messages between its ranks."""
