"""Entrain: encoder work deferred so that microbatches of both parts are even."""
