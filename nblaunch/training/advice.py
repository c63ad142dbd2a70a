"""The former place of ``nblaunch.errors.warn``, for the strategies until they import it from there."""

from nblaunch.errors import warn

__all__ = ["warn"]
