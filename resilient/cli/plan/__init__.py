"""``resilient plan``: the templates a job would get on which machines, and what it keeps as they fail."""
