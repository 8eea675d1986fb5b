"""``resilient simulate``: what a job would get done, and at what price, on nodes that come and go."""
