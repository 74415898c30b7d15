"""Fixtures of the tests of the core."""

from core.core_driver import driver

__all__ = ["driver"]
