"""The ``cuda`` backend of ecoffload."""

__version__ = "0.1.0"
