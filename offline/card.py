"""The card of a trained model, and the files around it in a Triton model repository.

    <repository>/<model>/config.pbtxt            what the server must know; written anew with every version
    <repository>/<model>/<version>/model.onnx    the model
    <repository>/<model>/<version>/model.yaml    its card

The card says what the model was trained on, by definition, how good it was on a later slice, and what it answers to a
few golden rows, so that whoever serves it can prove that it is this model and that it computes what it did in training.
"""

import hashlib
import re
from collections.abc import Collection, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, get_origin

import numpy as np
import yaml

from offline.profile import TrainingProfile
from schemas.errors import ConfigError
from schemas.model import GoldenRows, ModelSpec, ServedVersion
from schemas.output import Calibration, read_calibrations
from schemas.request_shape import RequestShape

MODEL_FILE: Final = "model.onnx"
CARD_FILE: Final = "model.yaml"
PROFILE_FILE: Final = "profile.json"
CONFIG_FILE: Final = "config.pbtxt"
SEMVER: Final = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)")
MAX_BATCH_SIZE: Final = 1_024
"""Rows in one request; above it the fixed cost of a request no longer shows."""
_PARAMETER: Final = re.compile(r'^parameters \{ key: "(\w+)" value \{ string_value: "([^"]*)" \} \}', re.MULTILINE)
_SPECIFIC: Final = re.compile(r"^version_policy \{\s*specific\s*\{\s*versions:\s*\[([\s\d,]+)\]", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """What is known of one trained version of a model.

    Attributes:
        name: The model's name.
        version: Version on the model server, 1 or more.
        semver: Semantic version, by what changed since the one before it (:mod:`offline.release`).
        contract: ``name@version`` of the spec it was trained for.
        sha256: SHA-256 of the model file.
        license: SPDX license identifier of the model.
        description: What it predicts and how.
        created: When it was trained, RFC 3339.
        inputs: Features in matrix order: ``feature`` (``view.feature``), ``view_version``, ``definition_hash``,
            ``key``, ``default``.
        outputs: Output columns: ``column``, ``tensor``, ``datatype``, ``width``, ``index``.
        training: Data and parameters: ``from``, ``until``, ``rows``, ``base_rate``, ``label``, ``framework``,
            ``parameters``.
        training_set: What the rows were made of: ``sha256`` of all of them, ``rows``, and for each view its version,
            definition hash, version of its table, rows read, and shares of statuses and nulls.
        evaluation: On rows later than all of training: ``from``, ``until``, ``rows``, ``base_rate``, ``auc``,
            ``brier``.
        golden: Rows with the outputs expected for them: ``inputs`` (null is missing), ``outputs`` by column.
        profile_sha256: SHA-256 of the profile beside the card; None where it was trained by an earlier release.
        linear: Coefficients of a linear model, with which a worker computes it where there is no server; see
            :class:`streams.inference.linear.LinearModel`.
        calibration: What answers are put right to before they are scores: points ``[answered, calibrated]`` by output
            column. The golden rows are as the file answers, without it.
    """

    name: str
    version: int
    semver: str
    contract: str
    sha256: str
    license: str
    description: str
    created: str
    inputs: list[dict[str, Any]]
    outputs: list[dict[str, Any]]
    training: dict[str, Any]
    training_set: dict[str, Any]
    evaluation: dict[str, Any]
    golden: list[dict[str, Any]]
    linear: dict[str, Any] | None = None
    profile_sha256: str | None = None
    calibration: dict[str, Any] | None = None

    @property
    def served_version(self) -> ServedVersion:
        """What a score says of the model that made it."""
        return ServedVersion(version=str(self.version), sha256=self.sha256)

    @property
    def golden_rows(self) -> GoldenRows:
        """What the server is asked before it is trusted."""
        inputs = [[np.nan if value is None else value for value in row["inputs"]] for row in self.golden]
        return GoldenRows(
            features=np.array(inputs, dtype=np.float32).reshape(len(self.golden), len(self.inputs)),
            outputs={
                output["column"]: np.array([row["outputs"][output["column"]] for row in self.golden], dtype=np.float64)
                for output in self.outputs
            },
        )

    def calibrations(self, spec: ModelSpec) -> dict[str, Calibration]:
        """What the model's answers are put right by, by output column.

        Raises:
            ConfigError: It cannot be used.
        """
        return read_calibrations(self.calibration, spec.outputs, where=f"model {self.name} version {self.version}")

    def check(self, spec: ModelSpec) -> None:
        """Make sure that the model was trained for ``spec``, on the very definitions it pins, and can be calibrated.

        Raises:
            ConfigError: It was not, or cannot.
        """
        where = f"model {self.name} version {self.version}"
        remedy = "train it anew (`headrace train`) or restore the definitions it was trained on"
        if (self.name, self.contract) != (spec.name, spec.reference):
            msg = f"{where} was trained for {self.contract}, expected {spec.reference}; {remedy}"
            raise ConfigError(msg)
        for got, expected in zip(self.inputs, described_inputs(spec), strict=False):
            if got != expected:
                msg = f"{where} was trained with input {got}, expected {expected}; {remedy}"
                raise ConfigError(msg)
        if len(self.inputs) != len(spec.inputs) or self.outputs != described_outputs(spec):
            msg = (
                f"{where} has {len(self.inputs)} inputs and outputs {self.outputs}, expected {len(spec.inputs)} inputs "
                f"and outputs {described_outputs(spec)}; {remedy}"
            )
            raise ConfigError(msg)
        self.calibrations(spec)


def described_inputs(spec: ModelSpec) -> list[dict[str, Any]]:
    """The spec's inputs as a card lists them."""
    return [
        {
            "feature": item.name,
            "view_version": item.view.version,
            "definition_hash": item.view.definition_hash,
            "key": item.key,
            "default": item.default,
        }
        for item in spec.inputs
    ]


def described_outputs(spec: ModelSpec) -> list[dict[str, Any]]:
    """The spec's outputs as a card lists them."""
    fields = ("column", "tensor", "datatype", "width", "index")
    return [{field: getattr(output, field) for field in fields} for output in spec.outputs]


def model_sha256(path: Path) -> str:
    """SHA-256 of a model file, as hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def versions(repository: Path, name: str) -> list[int]:
    """Versions of the model that the repository holds, oldest first."""
    directory = repository / name
    if not directory.is_dir():
        return []
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdecimal() and path.is_dir())


def load_card(repository: Path, name: str, version: int | None = None) -> ModelCard:
    """Read a model's card, and make sure that the model file beside it is the one it describes.

    Args:
        repository: The model repository.
        name: The model.
        version: Its version, None for the newest.

    Raises:
        ConfigError: There is no such model, its card is unreadable, or the model file is another one.
    """
    card = read_card(repository, name, version)
    model = repository / name / str(card.version) / MODEL_FILE
    got = model_sha256(model) if model.is_file() else "no file"
    if got != card.sha256:
        remedy = "restore it or train it anew"
        if got == "no file":
            remedy = "get it from the model store (`headrace models fetch`), or train it anew"
        msg = f"{model} has SHA-256 {got}, expected {card.sha256} as its card says; {remedy}"
        raise ConfigError(msg)
    return card


def read_card(repository: Path, name: str, version: int | None = None) -> ModelCard:
    """Read a model's card alone: its file may be in the model store.

    Raises:
        ConfigError: There is no such model, or its card is unreadable or lacks something.
    """
    held = versions(repository, name)
    if not held:
        msg = f"{repository} has no model {name}, expected {name}/1/{MODEL_FILE} in it; train it (`headrace train`)"
        raise ConfigError(msg)
    directory = repository / name / str(version or held[-1])
    path = directory / CARD_FILE
    try:
        document = yaml.safe_load(path.read_text())
        card = ModelCard(**document)
    except (OSError, yaml.YAMLError, TypeError) as exc:
        fault = " ".join(str(exc).split())
        msg = f"model card {path} is not readable ({fault}), expected one as `headrace train` writes it; train it anew"
        raise ConfigError(msg) from exc
    needed = [field for field in fields(ModelCard) if field.default is MISSING]
    kinds: dict[str, Any] = {field.name: get_origin(field.type) or field.type for field in needed}
    wrong = [name for name, kind in kinds.items() if not isinstance(document[name], kind)]
    if wrong or (card.name, card.version) != (name, int(directory.name)) or not SEMVER.fullmatch(card.semver):
        got = {field: document[field] for field in (*wrong, "name", "version", "semver")}
        msg = (
            f"model card {path} has {got}, expected name {name!r}, version {directory.name}, a version such as "
            "1.0.0, and fields as `headrace train` writes them; correct it, or train it anew"
        )
        raise ConfigError(msg)
    return card


def read_profile(repository: Path, card: ModelCard) -> TrainingProfile:
    """Read how the inputs of a model were distributed in training.

    Raises:
        ConfigError: It was trained by a release that kept no profile, or the profile is not that of the card.
    """
    path = repository / card.name / str(card.version) / PROFILE_FILE
    remedy = f"restore it, or train the version anew (`headrace train --version {card.version}`)"
    if card.profile_sha256 is None:
        msg = f"the card of {card.name} version {card.version} names no training profile, expected {path}; {remedy}"
        raise ConfigError(msg)
    try:
        content = path.read_bytes()
        if (got := hashlib.sha256(content).hexdigest()) != card.profile_sha256:
            msg = (
                f"training profile {path} has SHA-256 {got}, expected {card.profile_sha256} as its card says; {remedy}"
            )
            raise ConfigError(msg)
        return TrainingProfile.from_json(content)
    except (OSError, ValueError) as exc:
        msg = f"profile {path} is not readable ({exc}), expected it as `headrace train` writes it; {remedy}"
        raise ConfigError(msg) from exc


def write_version(
    repository: Path, *, spec: ModelSpec, card: ModelCard, model: bytes, profile: TrainingProfile | None = None
) -> Path:
    """Write a trained version and the server's configuration of the model.

    A new version is put together aside and renamed into place, so that nobody sees half of it; a version that is there
    already is replaced.

    Returns:
        The version's directory.
    """
    home = repository / spec.name
    target = home / str(card.version)
    staged = home / f".{card.version}.new"
    staged.mkdir(parents=True, exist_ok=True)
    (staged / MODEL_FILE).write_bytes(model)
    (staged / CARD_FILE).write_text(render_card(card))
    if profile is not None:
        (staged / PROFILE_FILE).write_bytes(profile.to_json())
    if target.exists():
        for path in staged.iterdir():
            path.replace(target / path.name)
        staged.rmdir()
    else:
        staged.replace(target)
    write_config(repository, spec, loaded=[*loaded_versions(repository, spec.name), card.version])
    return target


def loaded_versions(repository: Path, name: str) -> list[int]:
    """Versions that the server loads of a model, as its configuration says, oldest first; none where there is none.

    A configuration of another policy than ``specific`` was written by an earlier release, which loaded the newest two.
    """
    path = repository / name / CONFIG_FILE
    if not path.is_file():
        return []
    named = _SPECIFIC.search(path.read_text())
    held = versions(repository, name)
    return held[-2:] if named is None else sorted({int(number) for number in named[1].split(",")} & {*held})


def request_shape(repository: Path, name: str) -> RequestShape | None:
    """How a model is to be asked, as its configuration says; None where it does not.

    Raises:
        ConfigError: It says so in part, or not in numbers.
    """
    path = repository / name / CONFIG_FILE
    return RequestShape.of(dict(_PARAMETER.findall(path.read_text()))) if path.is_file() else None


def write_config(
    repository: Path, spec: ModelSpec, *, loaded: Collection[int], requests: RequestShape | None = None
) -> list[int]:
    """Write the server's configuration of a model, with the versions that it is to load.

    It is renamed into place, so that a server which reads it meanwhile does not see half of it.

    Args:
        repository: The model repository.
        spec: The model's contract.
        loaded: The versions; those that the repository does not hold are left out.
        requests: How the model is to be asked; None leaves that as it is.

    Returns:
        The versions that are loaded, oldest first.
    """
    home = repository / spec.name
    checksums = {number: read_card(repository, spec.name, number).sha256 for number in versions(repository, spec.name)}
    chosen = sorted({*loaded} & {*checksums})
    staged = home / f".{CONFIG_FILE}.new"
    requests = requests or request_shape(repository, spec.name)
    staged.write_text(render_config(spec, checksums=checksums, loaded=chosen, requests=requests))
    staged.replace(home / CONFIG_FILE)
    return chosen


def render_card(card: ModelCard) -> str:
    """Text of a card."""
    text: str = yaml.safe_dump(asdict(card), sort_keys=False, width=120, allow_unicode=True)
    return text


def checksum_parameter(version: str | int) -> str:
    """Name of the configuration parameter that holds the SHA-256 of a version's model file."""
    return f"sha256_{version}"


def render_config(
    spec: ModelSpec, *, checksums: Mapping[int, str], loaded: Collection[int], requests: RequestShape | None = None
) -> str:
    """Triton's model configuration.

    Args:
        spec: The model's contract.
        checksums: SHA-256 of the model file by version.
        loaded: Versions that the server loads.
        requests: How the model is to be asked; None leaves that to who asks.
    """
    outputs = ",\n".join(
        f'  {{ name: "{tensor}", data_type: TYPE_{datatype}, dims: [ {width} ] }}'
        for tensor, (datatype, width) in spec.output_tensors.items()
    )
    parameters = "\n".join(
        f'parameters {{ key: "{checksum_parameter(version)}" value {{ string_value: "{sha256}" }} }}'
        for version, sha256 in sorted(checksums.items())
    )
    if requests is not None:
        parameters += _REQUESTS + "\n".join(
            f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}'
            for name, value in requests.parameters.items()
        )
    return _CONFIG.format(
        name=spec.name,
        contract=spec.reference,
        max_batch_size=MAX_BATCH_SIZE,
        input_tensor=spec.input_tensor,
        n_features=len(spec.inputs),
        outputs=outputs,
        loaded=", ".join(str(number) for number in sorted(loaded)),
        parameters=parameters,
    )


_REQUESTS: Final = """

# How the scoring role asks, as `headrace models bench --write` has measured it.
"""
_CONFIG: Final = """\
# Written by `headrace train` for the contract {contract}; a change made here is lost with the next version.
name: "{name}"
backend: "onnxruntime"

# Rows in one request. The scoring role fills its batches itself, up to this size.
max_batch_size: {max_batch_size}
input [
  {{ name: "{input_tensor}", data_type: TYPE_FP32, dims: [ {n_features} ] }}
]
output [
{outputs}
]

# Requests that already wait for the instance are run as one. Never hold one back to wait for more: with few requests
# in flight, as here, that delay would be most of the answer's time.
dynamic_batching {{ max_queue_delay_microseconds: 0 }}

# A tree ensemble this small is fastest on one thread; more instances help only where there are idle cores.
instance_group [ {{ count: 1, kind: KIND_CPU }} ]
parameters {{ key: "intra_op_thread_count" value {{ string_value: "1" }} }}
parameters {{ key: "inter_op_thread_count" value {{ string_value: "1" }} }}

# Named one by one: a policy of the latest would unload a champion once newer versions are there. `headrace train` adds
# its version; `headrace models load` adds one too, and takes out those that no rollout uses.
version_policy {{ specific {{ versions: [ {loaded} ] }} }}

# The first real request must not pay for what the runtime sets up lazily.
model_warmup [
  {{
    name: "one_row"
    batch_size: 1
    inputs {{
      key: "{input_tensor}"
      value {{ data_type: TYPE_FP32, dims: [ {n_features} ], zero_data: true }}
    }}
  }}
]

# What each version's file must be: the scoring role compares it with the card it was given.
{parameters}
"""
