"""Runs one row's actions of one step."""
