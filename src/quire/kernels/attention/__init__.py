"""Attention over pages.

``cpu_attention`` over ``cpu_calls``: C++. ``triton_attention`` over ``attention_programs`` and
``tiles``: GPUs. ``sdpa`` over ``groups``,
``group_calls``, ``row_blocks``, ``visibility``, ``lse_attention``: PyTorch on any device.
"""
