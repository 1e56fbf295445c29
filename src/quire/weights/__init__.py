"""Weights: where they are read from, how they lie there, and the forms in which kernels take them.

``places``: which parameter a tensor fills. ``floats``, ``mxfp4``: formats of files.
``safetensors_files``: a source. ``checkpoint``: a source held against a model's places.
``lazy_parameters``: parameters while a model is loaded. ``panels``, ``float8``: packed forms in
memory; ``packed``: all of them, and the reference products.
"""
