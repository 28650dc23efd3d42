"""
The package in company: real workers beside what real projects run.

``neighbours`` lists who stands beside us and how each is switched on, ``play`` the flows with
their right values, ``matrix`` runs all flows beside one neighbour; ``python -m tests.company``
prints the table that docs/reference/works-with.md shows. ``settings``, ``project`` and ``tasks``
are a project; no neighbour is loaded into the process of the tests.
"""
