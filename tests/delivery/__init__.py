"""Tests of what a worker does with a message."""
