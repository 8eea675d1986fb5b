"""From what planners answer to what the runtime plans with and runs."""
