"""What planners are given: tables of samples, and what units of a model cost for them."""
