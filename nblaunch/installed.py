"""Whether a package can be imported here, found without importing it."""

from __future__ import annotations

import importlib.util


def is_installed(package: str) -> bool:
    """Whether ``package`` is installed, or was made by hand and put into ``sys.modules``.

    Asked anew each time, because people install packages from a cell. A mere folder of that name does not count, though
    Python would import it as an empty package: wandb and others name the folders after themselves in which they keep
    what they record, and these lie where notebooks do.

    Args:
        package: its name in imports, without dots.
    """
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # what was made by hand may have no specification
        return True
    return spec is not None and (spec.origin is not None or spec.submodule_search_locations is None)
