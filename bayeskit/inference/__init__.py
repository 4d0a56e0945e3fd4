"""Inference: samplers and what is computed from their draws."""
