"""Replay of availability traces: what a job would get done, and what it would cost, on nodes that come and go.

Pure but for reading a trace: no torch, no processes, no clock. Plans and step times are those of
:mod:`resilient.templates`, the same as in training.
"""
