"""Cornstarch: frozen-aware stages of a modality-parallel model."""
