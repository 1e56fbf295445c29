"""References: operations in plain PyTorch that define what kernels compute.

``attention``, ``recurrence``: the mixing of tokens. ``rope``, ``rows``: work on rows between
products. ``experts``, ``low_rank``: mixtures and adapters. Each kernel has the signature of its
reference.
"""
