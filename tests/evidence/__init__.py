"""
Evidence: ``python -m tests.evidence`` makes the pages of figures from the files of past runs.

``files`` writes such a file at the end of ``python -m tests.faults all --save`` and of
``python -m tests.benchmarks all --save``, and reads them; ``pages`` writes.
"""
