"""How bytes move: process groups, p2p between the stages of a pipeline, and messages between its ranks."""
