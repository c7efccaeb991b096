"""Model files in object storage, by their hash: what is in git is the card, which names the hash.

    <store>/<model>/<sha256>.onnx

A file is written once and never changed. The store is a directory or a URL that Arrow has a file system for (``s3://``,
``gs://``, ``abfss://``); credentials come from the environment, as with the clouds' own tools.
"""

from pathlib import Path

import pyarrow as pa
import pyarrow.fs as pafs

from offline.card import MODEL_FILE, ModelCard, model_sha256
from schemas.errors import ConfigError, SinkError, SinkUnavailableError


class ModelStore:
    """Where model files are kept.

    Args:
        root: A directory, or a URL.

    Raises:
        ConfigError: There is no file system for the URL.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        try:
            self._files, path = pafs.FileSystem.from_uri(root if "://" in root else str(Path(root).absolute()))
        except (pa.ArrowException, OSError) as exc:
            msg = f"model store {root!r} is none that can be used ({exc}), expected a directory or s3://bucket/path"
            raise ConfigError(msg) from exc
        self._path = path.rstrip("/")

    def publish(self, card: ModelCard, model: bytes) -> str:
        """Put a model file there, unless it is; returns its place.

        Raises:
            SinkUnavailableError: The store does not take it.
        """
        path = self._place(card)
        try:
            if self._files.get_file_info(path).type is not pafs.FileType.File:
                self._files.create_dir(path.rpartition("/")[0], recursive=True)
                # Renamed when it is whole: a local directory shows what is being written, object stores do not.
                aside = f"{path}.new" if isinstance(self._files, pafs.LocalFileSystem) else path
                with self._files.open_output_stream(aside) as stream:
                    stream.write(model)
                if aside != path:
                    self._files.move(aside, path)
        except (pa.ArrowException, OSError) as exc:
            msg = f"model store {self.root} does not take {path} ({exc}), expected a place that can be written to"
            raise SinkUnavailableError(msg, retry_after_ms=1_000) from exc
        return path

    def fetch(self, repository: Path, card: ModelCard) -> bool:
        """Put the file of a card beside it; returns whether it was not there before.

        Raises:
            SinkUnavailableError: The store does not answer, or has no such file.
            SinkError: What it has is another file, or it cannot be written.
        """
        target = repository / card.name / str(card.version) / MODEL_FILE
        if target.is_file() and model_sha256(target) == card.sha256:
            return False
        path = self._place(card)
        try:
            with self._files.open_input_stream(path) as stream:
                model = stream.read()
        except (pa.ArrowException, OSError) as exc:
            msg = (
                f"model store {self.root} does not give {path} ({exc}), expected the file of {card.name} "
                f"{card.semver}; see HEADRACE_MODEL_STORE, or train it anew"
            )
            raise SinkUnavailableError(msg, retry_after_ms=1_000) from exc
        aside = target.with_suffix(".new")
        try:
            aside.write_bytes(model)
            if (got := model_sha256(aside)) != card.sha256:
                msg = f"{path} of model store {self.root} has SHA-256 {got}, expected {card.sha256}; restore it there"
                raise SinkError(msg)
            aside.replace(target)
        finally:
            aside.unlink(missing_ok=True)
        return True

    def _place(self, card: ModelCard) -> str:
        return f"{self._path}/{card.name}/{card.sha256}.onnx"
