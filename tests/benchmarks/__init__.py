"""
Benchmarks: ``python -m tests.benchmarks NAME [NAME...]``.

Each module here with a function ``run(servers)`` is one; it returns ``Figure``s.
``report`` measures and prints; the limits stand in ``limits.json``.
"""
