"""EAGLE-3 speculative decoding on MLX, for the models of mlx-lm.

MLX is not imported before a public name is asked for: ``load_fast_blas`` has to come first. That
happens then, unless MLX is there already; our own commands begin with it.
"""

__version__ = "0.2.0"  # above the imports, because modules below read it

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .doctor.packages import explained, running_command
from .system.blas import load_fast_blas

if TYPE_CHECKING:
    from .public import *  # noqa: F403

OWN_NAMES = ("__version__", "load_fast_blas")
MODULES = ("bench", "convert", "reference", "server", "structured", "train")


def __getattr__(name: str) -> Any:
    """Import a public name, or ``mlx_eagle.convert`` and the like, when it is first asked for."""
    if name.startswith("__") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if "mlx.core" not in sys.modules:
        load_fast_blas()
    if name in MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    with explained():
        public = importlib.import_module(f"{__name__}.public")
    if name == "__all__":
        return [*OWN_NAMES, *public.__all__]
    if name not in public.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(public, name)


def __dir__() -> list[str]:
    return [*__getattr__("__all__"), *MODULES]


class _Package(ModuleType):
    """This package, in which ``generate`` is the function, and not the module of that name."""

    def __setattr__(self, name: str, value: Any) -> None:
        # What Python does at the end of importing a module.
        if name == "generate" and isinstance(value, ModuleType):
            value = value.generate
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
if running_command() is not None:
    load_fast_blas()
    with explained():
        importlib.import_module(f"{__name__}.decoding.loop")
