"""Metrics of a command that ends, in a file for the textfile collector of Prometheus' node exporter."""

from pathlib import Path

from prometheus_client import CollectorRegistry, write_to_textfile

from schemas.errors import ServiceError


def write_metrics_file(path: Path, registry: CollectorRegistry) -> None:
    """Write metrics, whole or not at all.

    Raises:
        ServiceError: The file cannot be written.
    """
    try:
        write_to_textfile(str(path), registry)
    except OSError as exc:
        msg = f"metrics cannot be written to {path}: {exc}; name a file in a directory that is there"
        raise ServiceError(msg) from exc
