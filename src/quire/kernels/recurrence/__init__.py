"""Recurrences of recurrent layers.

``chunked`` over ``groups`` and ``decays``: PyTorch, in products over chunks of tokens.
``triton_recurrence`` over ``recurrence_programs`` and ``steps``: GPUs.
"""
