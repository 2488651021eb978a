"""How a step runs: the traced structure of a module, its stages, and the runner that executes a schedule."""
