"""The version, in one place that needs no other import."""

__version__ = "0.1.0"
