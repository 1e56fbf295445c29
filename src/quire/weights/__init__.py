"""Weights: where they are read from, how they lie there, and the forms in which kernels take them.

``places``: which parameter a tensor fills. ``floats``, ``mxfp4``, ``gguf_blocks``: formats of
files, among others. ``safetensors_files``, ``gguf_files``: sources; ``models.gguf`` knows which
tensors of a GGUF file make which of a family. ``checkpoint``: a source held against a model's
places. ``lazy_parameters``: parameters while a model is loaded. ``panels``, ``block_panels``,
``float8``: packed forms in memory; ``packed``: all of them, and the reference products.
"""
