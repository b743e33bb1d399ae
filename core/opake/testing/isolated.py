"""The isolated registry, where authors of tests look for it; `opake.checking` has it, and needs no test runner."""

from opake.checking.isolated import Distribution, isolated_registry

__all__ = ["Distribution", "isolated_registry"]
