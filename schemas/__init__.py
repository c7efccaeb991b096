"""Definitions: contracts, sources, entities, views, models, rows, errors. Pure."""
