"""Fast versions of operations in ``ops`` and ``sampling``, with the same signatures.

``attention/``, ``linear/``, ``recurrence/``, ``rows/``, ``draw/``: by what they compute; CPU and
Triton stand side by side. ``block``: a whole decoder block as one C++ call. ``native_library``: the
C++ in ``cpu/``. ``triton_support``: where Triton runs. ``cpu_process``: threads and freed memory of
this process.
"""
