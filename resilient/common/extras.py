"""Looks for the packages that only few features need, and says which of this package's extras installs them.

They are imported where they are needed, after :func:`require`; nothing is imported here.
"""

from __future__ import annotations

from importlib.util import find_spec

_EXTRAS = {
    "matplotlib": ("matplotlib", "figures"),
    "sklearn": ("scikit-learn", "demo"),
    "highspy": ("highspy", "solvers"),
    "pyomo": ("pyomo", "solvers"),
    "pyetcd": ("etcd-sdk-python", "etcd"),
}
"""Package, as it is imported: what it is installed as, and the extra it belongs to."""


class MissingPackageError(ImportError):
    """A package that this feature needs is not installed; the message names the extra that brings it."""


def require(package: str, feature: str) -> None:
    """Check that an optional package is there, before it is imported.

    Args:
        package: Its name in ``import`` statements.
        feature: What needs it, as users call it: an option, a command, an argument.

    Raises:
        MissingPackageError: It is not installed.
    """
    if find_spec(package) is None:
        project, extra = _EXTRAS[package]
        raise MissingPackageError(
            f"{feature} needs {project}, which is not installed; pip install 'resilient-train[{extra}]'", name=package
        )
