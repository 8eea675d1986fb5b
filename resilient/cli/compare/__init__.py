"""``resilient compare``: every multimodal planner on the same batches, without the machines."""
