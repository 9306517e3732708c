"""For authors of tiers: a store in memory that fails on request (`fake`), and what a tier must pass (`suite`).

ECOFFLOAD_TIER="myscheme://host:port" pytest --pyargs ecoffload.testing.tiers.suite
"""
