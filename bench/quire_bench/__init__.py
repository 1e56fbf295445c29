"""Benchmarks: Quire's speed beside the hardware's peak and a peer in the same run.

This package is installed with Quire. It has the commands of ``quire bench`` and the modules that
the scripts beside it share: peaks (``hardware``), tables and JSON lines (``reports``), ``peers``,
clients of servers. Each script in ``bench/`` measures one subject and runs from a checkout.
"""
