"""What lightning-holmes bench is made of: the workload, the contenders, the worker on each rank, and the report."""
