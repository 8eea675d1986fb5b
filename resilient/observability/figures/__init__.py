"""Draws what is observed or simulated; matplotlib is imported when a figure is drawn."""
