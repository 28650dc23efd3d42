"""Bridges to other packages, each in a module that only the project imports."""
