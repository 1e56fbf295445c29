"""LoRA: from files in PEFT's format to products in every layer.

``peft`` over ``peft_config``, ``peft_files``: reading. ``targets``, ``checks``:
which maps of a model an adapter changes. ``pool`` over ``rank_rows``: adapters on the device.
``low_rank``: products for a batch of many adapters. ``keys``, ``history``: adapters of a sequence's
tokens.
"""
