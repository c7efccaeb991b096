"""Offline: training sets, model cards, backfills and parity, over the same engine as the live pipeline."""
