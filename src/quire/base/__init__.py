"""Values and helpers that every room uses, without a model: read ``types`` first.

``types``: steps, chunks, edits. ``config``, ``sampling_params``, ``segments``, ``hints``: what
users give; ``outputs``: what they get; ``errors``: what is refused. ``signatures``, ``interrupts``:
guards of public calls. ``forks``, ``process_exit``, ``finalizers``: ends of processes and objects.
``process_limits``: memory and time that this process may use. ``uploads``, ``host_link``: copies
between the host and a device.
"""
