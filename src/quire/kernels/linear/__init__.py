"""Linear maps: ``cpu_linear`` in C++, ``float8`` on GPUs, ``low_rank`` for adapters in C++."""
