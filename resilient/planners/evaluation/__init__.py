"""Simulates one step of any planner's assignment, task by task."""
