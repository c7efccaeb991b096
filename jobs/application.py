"""The application that the command line runs: a Python module that defines views and models."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass

from schemas.errors import ConfigError
from schemas.model import ModelSpec
from schemas.view import FeatureView


@dataclass(frozen=True, kw_only=True)
class Application:
    """What a module defines.

    Attributes:
        module: Name of the module.
        views: Its ``VIEWS``, by name.
        models: Its ``MODELS``, by name; a module may have none.
    """

    module: str
    views: Mapping[str, FeatureView]
    models: Mapping[str, ModelSpec]

    def view(self, name: str) -> FeatureView:
        """Find a view.

        Raises:
            ConfigError: There is none of that name.
        """
        if name not in self.views:
            msg = f"view {name!r} is not defined in {self.module}, expected one of {sorted(self.views)}"
            raise ConfigError(msg)
        return self.views[name]


def load_application(module: str) -> Application:
    """Import a module and take its ``VIEWS`` and ``MODELS``.

    Raises:
        ConfigError: It cannot be imported, defines no views, or a model reads a view that is not as it pins it.
    """
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as exc:
        msg = (
            f"application {module!r} cannot be imported: {exc}; expected a module on the Python path that defines VIEWS"
        )
        raise ConfigError(msg) from exc
    views = list(getattr(loaded, "VIEWS", ()))
    if not views or not all(isinstance(view, FeatureView) for view in views):
        msg = f"application {module!r} has VIEWS = {views!r}, expected a list of FeatureView"
        raise ConfigError(msg)
    by_name = {view.name: view for view in views}
    if len(by_name) != len(views):
        msg = f"application {module!r} defines a view name twice: {sorted(view.name for view in views)}"
        raise ConfigError(msg)
    models = {model.name: model for model in getattr(loaded, "MODELS", ())}
    for model in models.values():
        model.check_views(by_name)
    return Application(module=module, views=by_name, models=models)
