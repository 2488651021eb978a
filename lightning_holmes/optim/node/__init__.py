"""The optimizer node: a process without a GPU that holds parameters and optimizer states, and steps the user's optimizer."""
