"""The application that the command line runs: a Python module that defines views and models."""

import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Final, TypeVar

from jobs.role import Role
from jobs.schema_registry import name_registry
from schemas.contract import Contract
from schemas.errors import ConfigError, HeadraceError
from schemas.evolution import check_evolution
from schemas.generated_contract import check_generated
from schemas.model import ModelSpec
from schemas.registry import check_recorded
from schemas.topic import TopicSettings
from schemas.topology import connect
from schemas.use_case import UseCase
from schemas.view import FeatureView

_NAME: Final = re.compile(r"[A-Za-z0-9_-]+")
_MODULE: Final = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_Kind = TypeVar("_Kind")


@dataclass(frozen=True, kw_only=True)
class Application:
    """What a module defines.

    Attributes:
        name: Tells it from other applications on the same Kafka: its ``NAME``, else the last part of the module's name.
        module: Name of the module.
        views: Its ``VIEWS``, by name.
        models: Its ``MODELS``, by name; a module may have none.
        use_cases: Its ``USE_CASES``, each of which gets a route of the HTTP API; a module may have none.
        topics: Its ``TOPICS``: topics that are to be kept otherwise than by default; a module may have none.
        variables: Names of views by the variables that hold them.
    """

    name: str
    module: str
    views: Mapping[str, FeatureView]
    models: Mapping[str, ModelSpec]
    use_cases: Sequence[UseCase] = ()
    topics: Mapping[str, TopicSettings] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def served_models(self) -> dict[str, ModelSpec]:
        """What runs on the model server, by name: the models, and their light models."""
        light = [model.light for model in self.models.values() if model.light is not None]
        return {**self.models, **{model.name: model for model in light}}

    def view(self, name: str) -> FeatureView:
        """Find a view by its name, or else by the variable that holds it in the module.

        Raises:
            ConfigError: There is none of that name.
        """
        name = name if name in self.views else self.variables.get(name, name)
        if name not in self.views:
            msg = f"view {name!r} is not defined in {self.module}, expected one of {sorted(self.views)}"
            raise ConfigError(msg)
        return self.views[name]


def consumer_groups(application: Application) -> dict[Role, tuple[str, list[str]]]:
    """Name the consumer group of each role, and the topics that it reads."""
    views, models = application.views.values(), application.models.values()
    features, topics = sorted(view.topic for view in views), connect(list(views)).topics
    prefix = f"headrace.{application.name}"
    groups = {
        Role.FEATURES: (f"{prefix}.features", topics),
        Role.ONLINE: (f"{prefix}.online", sorted([*features, *scores_kept(application)])),
        Role.OFFLINE: (f"{prefix}.offline", sorted([*features, *topics])),
    }
    for model in models:
        groups[Role.SCORING] = (f"{prefix}.scoring.{model.name}", [application.views[model.trigger.name].topic])
    return groups


def scores_kept(application: Application) -> dict[str, tuple[ModelSpec, int]]:
    """List the topics of scores that use cases are answered with, each with its model and for how many us they stay."""
    kept: dict[str, tuple[ModelSpec, int]] = {}
    for use_case in application.use_cases:
        if (model := use_case.model) is not None:
            kept[model.topic] = (model, max(use_case.keep_score_us, kept.get(model.topic, (model, 0))[1]))
    return kept


def scored_model(application: Application) -> ModelSpec | None:
    """Find the model that the scoring role serves; None where the application has none.

    Raises:
        ConfigError: It has several.
    """
    if len(application.models) > 1:
        found = sorted(application.models)
        msg = f"{application.module} has models {found}, expected one at most in MODELS: the scoring role serves one"
        raise ConfigError(msg)
    return next(iter(application.models.values()), None)


def load_application(module: str) -> Application:
    """Import a module and take its ``VIEWS``, ``MODELS`` and ``NAME``.

    Without VIEWS it is every view that stands in it by a name.

    Args:
        module: Name of a module on the Python path or in the working directory, or path of a ``.py`` file.

    Raises:
        ConfigError: It cannot be imported, defines no views, or a model reads a view that is not as it pins it.
    """
    name_registry()
    loaded = _import(module)
    standing = {name: value for name, value in vars(loaded).items() if isinstance(value, FeatureView)}
    views: list[FeatureView] = list({id(view): view for view in standing.values()}.values())
    if hasattr(loaded, "VIEWS"):
        views = _listed(loaded, "VIEWS", FeatureView, module=module)
    if not views:
        msg = f"application {module!r} defines views [], expected a FeatureView, or a list of them in VIEWS"
        raise ConfigError(msg)
    by_name = {view.name: view for view in views}
    if len(by_name) != len(views):
        msg = f"application {module!r} defines a view name twice: {sorted(view.name for view in views)}"
        raise ConfigError(msg)
    defined = _listed(loaded, "MODELS", ModelSpec, module=module)
    models = {model.name: model for model in defined}
    if len(models) != len(defined):
        msg = f"application {module!r} defines a model name twice: {sorted(model.name for model in defined)}"
        raise ConfigError(msg)
    for model in models.values():
        model.check_views(by_name)
    use_cases = _listed(loaded, "USE_CASES", UseCase, module=module)
    _check_use_cases(use_cases, views=by_name, models=models, where=f"application {module!r}")
    topics = getattr(loaded, "TOPICS", {})
    if not isinstance(topics, Mapping) or not all(isinstance(value, TopicSettings) for value in topics.values()):
        msg = f"application {module!r} has {topics!r} in TOPICS, expected TopicSettings by the names of topics"
        raise ConfigError(msg)
    variables = {variable: view.name for variable, view in standing.items()}
    return Application(
        name=_name(loaded, module),
        module=module,
        views=by_name,
        models=models,
        use_cases=use_cases,
        topics=dict(topics),
        variables=variables,
    )


def _listed(loaded: ModuleType, name: str, kind: type[_Kind], *, module: str) -> list[_Kind]:
    """What a module lists under a name; nothing where it does not have it."""
    listed = getattr(loaded, name, ())
    items = list(listed) if isinstance(listed, Iterable) and not isinstance(listed, Mapping) else None
    if items is None or not all(isinstance(item, kind) for item in items):
        shown = listed if items is None else items
        expected = f"expected a {kind.__name__} or more in a list, {name}"
        msg = f"application {module!r} defines {name.lower()} {shown!r}, {expected}"
        raise ConfigError(msg)
    return items


def _check_use_cases(
    use_cases: Sequence[UseCase], *, views: Mapping[str, FeatureView], models: Mapping[str, ModelSpec], where: str
) -> None:
    shapes: dict[str, str] = {}
    for use_case in use_cases:
        if (other := shapes.get(use_case.shape)) is not None:
            msg = f"{where} has use cases {other} and {use_case.path}, expected each path once, whatever its parameters"
            raise ConfigError(msg)
        shapes[use_case.shape] = use_case.path
        unknown = [lookup.view.name for lookup in use_case.lookups if views.get(lookup.view.name) is not lookup.view]
        if unknown or (use_case.model is not None and models.get(use_case.model.name) is not use_case.model):
            what = f"views {unknown}" if unknown else f"model {use_case.model.name}" if use_case.model else ""
            msg = f"{where}, use case {use_case.path}: {what} is not in VIEWS or MODELS, expected it there"
            raise ConfigError(msg)
        if (model := use_case.model) is not None:
            trigger = views[model.trigger.name]
            if trigger.serving.personal == "hash" and model.entity in trigger.personal:
                msg = (
                    f"{where}, use case {use_case.path}: scores of {model.name} are kept online by `{model.entity}`, "
                    f"which is personal and which view {trigger.name} hashes; expected an entity that is not personal, "
                    "or a use case without a model"
                )
                raise ConfigError(msg)


def _name(loaded: ModuleType, module: str) -> str:
    name = getattr(loaded, "NAME", Path(module).stem if module.endswith(".py") else module.rpartition(".")[2])
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        msg = f"application {module!r} has the name {name!r}, expected letters, digits, - and _; set NAME in the module"
        raise ConfigError(msg)
    return name


def load_recorded_application(module: str) -> Application:
    """Load an application, and see that its views, contracts and scores are as they were recorded.

    Raises:
        ConfigError: It cannot be loaded, something differs from what was recorded under its version,
            or a contract does not fit the one before it.
    """
    application = load_application(module)
    check_recorded(application.views.values())
    check_generated([*application.views.values(), *application.models.values()])
    check_evolution(contracts_of(application.views.values()))
    return application


def contracts_of(views: Iterable[FeatureView]) -> list[Contract]:
    """List the contracts of the sources of views, each once, by reference."""
    found = {source.contract: source.schema for view in views for source in view.sources}
    return [found[reference] for reference in sorted(found)]


def _import(module: str) -> ModuleType:
    if not module.endswith(".py") and not _MODULE.fullmatch(module):
        msg = (
            f"application {module!r} is no name of a module, expected one such as 'shop.views' in the working "
            "directory or on the Python path, or a .py file"
        )
        raise ConfigError(msg)
    try:
        if module.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(module).stem, module)
            if spec is None or spec.loader is None:
                raise ModuleNotFoundError(module)
            if (beside := str(Path(module).resolve().parent)) not in sys.path:
                sys.path.append(beside)  # as Python does for a script, but last: no file there hides a module of ours
            loaded = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(loaded)
            return loaded
        if (here := str(Path.cwd())) not in sys.path:
            sys.path.insert(0, here)
        return importlib.import_module(module)
    except HeadraceError:
        raise
    except Exception as exc:
        if _is_absent(module, exc):
            msg = (
                f"application {module!r} cannot be imported: {exc}; expected a module in the working directory or on "
                "the Python path, or a .py file"
            )
            raise ConfigError(msg) from exc
        place = _place(exc)
        where = "" if isinstance(exc, SyntaxError) else f" at {place.filename}, line {place.lineno}"
        msg = (
            f"application {module!r} cannot be imported: {type(exc).__name__}: {exc}{where}; expected a module that "
            "runs through, correct it"
        )
        raise ConfigError(msg) from exc


def _is_absent(module: str, exc: Exception) -> bool:
    """Tell whether it is the module itself, or a package that it is in, that is not there."""
    if module.endswith(".py"):
        return isinstance(exc, FileNotFoundError) and not Path(module).exists()
    return isinstance(exc, ModuleNotFoundError) and exc.name is not None and f"{module}.".startswith(f"{exc.name}.")


def _place(exc: Exception) -> traceback.FrameSummary:
    """Where in the user's code an import failed: not in the import machinery, which stands below it."""
    frames = traceback.extract_tb(exc.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith("<frozen ")]
    return (own or frames)[-1]
