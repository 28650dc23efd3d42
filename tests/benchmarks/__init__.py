"""
Benchmarks: ``python -m tests.benchmarks NAME [NAME...] [--json]``.

Each module here with a function ``run(servers)`` is one; it returns ``Figure``s.
``report`` measures and prints; the limits stand in ``limits.json``.
"""
