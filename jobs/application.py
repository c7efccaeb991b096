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
from typing import Final

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
    views = list(getattr(loaded, "VIEWS", {id(view): view for view in standing.values()}.values()))
    if not views or not all(isinstance(view, FeatureView) for view in views):
        msg = f"application {module!r} defines views {views!r}, expected a FeatureView, or a list of them in VIEWS"
        raise ConfigError(msg)
    by_name = {view.name: view for view in views}
    if len(by_name) != len(views):
        msg = f"application {module!r} defines a view name twice: {sorted(view.name for view in views)}"
        raise ConfigError(msg)
    defined = list(getattr(loaded, "MODELS", ()))
    models = {model.name: model for model in defined}
    if len(models) != len(defined):
        msg = f"application {module!r} defines a model name twice: {sorted(model.name for model in defined)}"
        raise ConfigError(msg)
    for model in models.values():
        model.check_views(by_name)
    use_cases = list(getattr(loaded, "USE_CASES", ()))
    _check_use_cases(use_cases, views=by_name, models=models, where=f"application {module!r}")
    topics = dict(getattr(loaded, "TOPICS", {}))
    if wrong := {name: value for name, value in topics.items() if not isinstance(value, TopicSettings)}:
        msg = f"application {module!r} has {wrong!r} in TOPICS, expected TopicSettings by the names of topics"
        raise ConfigError(msg)
    variables = {variable: view.name for variable, view in standing.items()}
    return Application(
        name=_name(loaded, module),
        module=module,
        views=by_name,
        models=models,
        use_cases=use_cases,
        topics=topics,
        variables=variables,
    )


def _check_use_cases(
    use_cases: Sequence[UseCase], *, views: Mapping[str, FeatureView], models: Mapping[str, ModelSpec], where: str
) -> None:
    shapes: dict[str, str] = {}
    for use_case in use_cases:
        if not isinstance(use_case, UseCase):
            msg = f"{where} has {use_case!r} in USE_CASES, expected a UseCase"
            raise ConfigError(msg)
        if (other := shapes.get(use_case.shape)) is not None:
            msg = f"{where} has use cases {other} and {use_case.path}, expected each path once, whatever its parameters"
            raise ConfigError(msg)
        shapes[use_case.shape] = use_case.path
        unknown = [lookup.view.name for lookup in use_case.lookups if views.get(lookup.view.name) is not lookup.view]
        if unknown or (use_case.model is not None and models.get(use_case.model.name) is not use_case.model):
            what = f"views {unknown}" if unknown else f"model {use_case.model.name}" if use_case.model else ""
            msg = f"{where}, use case {use_case.path}: {what} is not in VIEWS or MODELS, expected it there"
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
    except (ModuleNotFoundError, FileNotFoundError) as exc:
        msg = (
            f"application {module!r} cannot be imported: {exc}; expected a module in the working directory or on the "
            "Python path, or a .py file"
        )
        raise ConfigError(msg) from exc
    except HeadraceError:
        raise
    except Exception as exc:
        place = traceback.extract_tb(exc.__traceback__)[-1]
        where = "" if isinstance(exc, SyntaxError) else f" at {place.filename}, line {place.lineno}"
        msg = (
            f"application {module!r} cannot be imported: {type(exc).__name__}: {exc}{where}; expected a module that "
            "runs through, correct it"
        )
        raise ConfigError(msg) from exc
