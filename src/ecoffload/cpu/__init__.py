"""The built-in backend: what runs when an engine's device is the CPU, found through the same entry point as others."""
