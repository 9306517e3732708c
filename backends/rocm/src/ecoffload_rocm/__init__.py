"""The ``rocm`` backend of ecoffload: AMD GPUs through the HIP runtime that torch loaded."""

__version__ = "0.1.0"
