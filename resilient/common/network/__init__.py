"""Sockets that any room may open: the ports they listen at, and where they lead."""
