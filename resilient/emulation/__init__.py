"""Devices that wait instead of computing, so that a few cores show what schedules and planners do on many."""
