"""
Scenarios in which processes are killed or paused and servers go away, and their oracles.

``python -m tests.faults SCENARIO...`` runs them (``__main__``). A ``scenario`` has a plan, which
is its options too, a function that records a run in a ``lab``, and an ``oracle``, which reads
from the recorded history which promises were broken. A ``nemesis`` does the harm meanwhile.
"""
