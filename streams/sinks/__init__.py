"""Stores that feature rows are written to: online (Redis) and offline (Delta Lake)."""
