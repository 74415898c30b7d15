"""The kvoffd daemon: it keeps the KV cache of a node's inference engines in host memory."""

__version__ = "0.1.0"
