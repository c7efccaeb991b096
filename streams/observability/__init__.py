"""Prometheus metrics of every role."""
