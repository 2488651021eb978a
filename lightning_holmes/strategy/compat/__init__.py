"""What keeps Lightning's callbacks, metrics and signals right while ranks hold parts of a module."""
