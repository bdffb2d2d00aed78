"""The version: read by the package and, without importing it, by setup.py."""

__version__ = "0.1.0"
