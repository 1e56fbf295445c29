"""Recipe of the adapter ``tiny-python-docstrings``: a LoRA that makes the bundled model write
docstrings.

Run ``python -m recipes.docstring_adapter.train --help`` in the repository's root.
"""
