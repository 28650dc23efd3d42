"""Tasks for the tests on real workers."""
