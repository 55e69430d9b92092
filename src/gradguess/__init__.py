"""Train PyTorch networks without backpropagation: gradients guessed from one forward pass.

The public names stand in `gradguess.front`. It is imported with the first of them that is used, so that the help of
the command line does not wait for PyTorch.
"""

import sys as _sys
from importlib import import_module as _import_module
from types import ModuleType as _ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.3.0"

if TYPE_CHECKING:
    from gradguess.front import *  # noqa: F403 (its `__all__` names them)


class _Package(_ModuleType):
    """This package as an object."""

    def __getattr__(self, name: str) -> Any:
        """Take over all public names; Python calls this for a name that is not there."""
        if name == "__all__" or not name.startswith("_"):
            front = _import_module("gradguess.front")
            vars(self).update({public: getattr(front, public) for public in front.__all__}, __all__=front.__all__)
            if name in vars(self):
                return vars(self)[name]
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        """Keep the places of the functions `estimate`, `diagnose` and `advise`: an import would put modules there."""
        if name not in ("estimate", "diagnose", "advise") or not isinstance(value, _ModuleType):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.__all__})


_sys.modules[__name__].__class__ = _Package
