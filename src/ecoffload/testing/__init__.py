"""What authors of backends test with: the conformance suite, strategies, simulated devices, a harness for one device.

Installed with the core and never imported by it. ``plugin`` is the pytest plugin (loaded by every pytest run beside an
installed ecoffload, so it imports neither torch nor hypothesis); ``conformance`` holds the tests; the rest serves them.
"""
