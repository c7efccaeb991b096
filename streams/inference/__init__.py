"""Scoring: micro-batches, model inputs, and the model server."""
