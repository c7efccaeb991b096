"""Every error Headrace raises on purpose, in one tree.

A subclass stands here only where a caller acts differently on it. Messages say what was got, what was expected and
what to do. Late data is not an error: late rows are output (see ``streams.windowing``).
"""


class HeadraceError(Exception):
    """Root of all errors that Headrace raises on purpose."""


class ConfigError(HeadraceError):
    """A definition, option or setting is wrong; raised before any I/O, exit code 2."""


class SchemaError(HeadraceError):
    """Bytes or columns do not agree with their contract."""


class DecodeError(SchemaError):
    """A payload could not be decoded at all."""


class SchemaMismatchError(SchemaError):
    """A payload, file or recorded contract has another schema than the one expected."""


class RegistryUnavailableError(SchemaError):
    """The schema registry does not answer; may be tried again."""


class WindowingError(HeadraceError):
    """An invariant of the event-time engine is broken; the partition must stop."""


class StateVersionError(WindowingError):
    """A state snapshot belongs to another definition or format."""


class SinkError(HeadraceError):
    """Writing to a store failed."""


class SinkUnavailableError(SinkError):
    """The store does not answer; the same write may be tried again after ``retry_after_ms``."""

    def __init__(self, message: str, *, retry_after_ms: int = 1_000) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class SinkConflictError(SinkError):
    """Another writer got there first; re-read and decide again."""


class SinkRejectedError(SinkError):
    """The store refused the write; trying again cannot help."""


class InferenceError(HeadraceError):
    """Scoring failed."""


class InferenceUnavailableError(InferenceError):
    """The inference server or the model is not there; may be tried again."""


class InferenceTimeoutError(InferenceError):
    """The inference server did not answer inside the deadline."""


class TensorMismatchError(InferenceError):
    """Tensors and the model's declared inputs or outputs disagree."""


class LineageError(HeadraceError):
    """A lineage event could not be sent; metered, never blocks data."""


class ServiceError(HeadraceError):
    """A local service could not be installed, started or reached."""
