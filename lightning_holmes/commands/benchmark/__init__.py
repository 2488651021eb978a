"""The parts of lightning-holmes bench: the workload, the contenders, the worker on each rank, and the report."""
