"""The published planners, one folder a paper; none imports another but the baselines."""
