"""Planted faults that the test suites must find (``make mutants``)."""
