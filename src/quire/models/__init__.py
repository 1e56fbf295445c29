"""Families of models: one file each, a configuration and a table of tensor names.

``families``: which architecture is which. ``decoder`` over ``blocks`` and ``geometry``, ``llama``
as an example: dense models. ``mixture``, ``hybrid_decoder``, ``deepseek``: other kinds.
``loading``: from a checkpoint to a model; ``gguf``: from a GGUF file to a configuration and names.
``fallback`` over ``probe``: any other decoder of transformers.
"""
