"""Plug-ins by name: each registers itself where it is written, in a folder of warmkv or in a package outside.

A package outside names a module of its own in the entry point group, under the name of what the module registers:

    [project.entry-points."warmkv.methods"]
    mymethod = "mypackage.mymethod"
"""

from __future__ import annotations

import pkgutil
import re
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Protocol, TypeVar

from warmkv.faults import UserError

if TYPE_CHECKING:
    from warmkv.policies.compression.method import Method
    from warmkv.policies.compression.storage_format import StorageFormat


class Named(Protocol):
    """A plug-in: a class or a value with the name that users write."""

    @property
    def name(self) -> str: ...


Plugin = TypeVar("Plugin", bound=Named)


class PluginError(UserError):
    """A package outside whose plug-in cannot be used; the message names it."""


class Registry(dict[str, Plugin]):
    """The plug-ins of one kind by name, in alphabetical order once they are loaded.

    `kind` is what messages call them, `folder` the package of warmkv whose modules are imported, `group` the entry
    point group of packages outside.
    """

    def __init__(self, kind: str, folder: str, group: str) -> None:
        super().__init__()
        self.kind, self.folder, self.group = kind, folder, group
        self._loaded = False

    def register(self, plugin: Plugin) -> Plugin:
        """Add a plug-in and return it: a decorator.

        Raises PluginError if its name is taken or cannot be written in a policy's short form, or if it comes too late.
        """
        if not re.fullmatch(r"\w[\w.-]*", plugin.name):
            raise PluginError(f"{self.kind} {plugin.name!r}: write the name with letters, digits, _, - and .")
        if plugin.name in self:
            raise PluginError(f"a {self.kind} called {plugin.name} is registered already; choose another name")
        if self._loaded:
            raise PluginError(f"{self.kind} {plugin.name} is registered too late: name it in entry points {self.group}")
        self[plugin.name] = plugin
        return plugin

    def __missing__(self, name: str) -> Plugin:
        raise KeyError(f"no {self.kind} is called {name!r}; there are {', '.join(self)}")

    def load(self) -> None:
        """Import whatever registers a plug-in, once. Raises PluginError for a package outside that does not."""
        if self._loaded:
            return
        for module in pkgutil.iter_modules(import_module(self.folder).__path__):
            import_module(f"{self.folder}.{module.name}")
        for entry in entry_points(group=self.group):
            self._load_outside(entry)
        self._loaded = True
        ordered = dict(sorted(self.items()))
        self.clear()
        self.update(ordered)

    def _load_outside(self, entry: EntryPoint) -> None:
        package = entry.dist.name if entry.dist else entry.value
        try:
            entry.load()
        except Exception as error:
            raise PluginError(
                f"{self.kind} {entry.name} of package {package} cannot be imported ({type(error).__name__}: {error}); "
                "mend or uninstall the package. Its module may import warmkv.policy_spec for types only"
            ) from error
        if entry.name not in self:
            raise PluginError(f"package {package} offers a {self.kind} {entry.name}, but {entry.value} registers none")


METHODS: Registry[type[Method]] = Registry("method", "warmkv.policies.compression.methods", "warmkv.methods")
"""Compression methods; `warmkv.policy_spec` loads them."""

STORAGES: Registry[StorageFormat] = Registry("storage", "warmkv.policies.compression.storages", "warmkv.storages")
"""Storage formats; `warmkv.policy_spec` loads them."""
