"""The conformance suite, asked of every backend: ``pytest --pyargs ecoffload.testing.conformance``.

Module-level tests that reach memory through ``backend.ops`` and swap through the core's own way in. Each has an id that
never changes and the suite version that brought it; what a backend declares decides what is asked of it.
"""
