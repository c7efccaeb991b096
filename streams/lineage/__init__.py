"""OpenLineage events: what each batch read and wrote."""
