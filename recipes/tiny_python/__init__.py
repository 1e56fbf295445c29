"""Recipe of the bundled model ``tiny-python``: from Python sources on this machine to a checkpoint.

Stages, each reading what the one before it left in the work directory:

``collect`` sources -> ``tokenizer`` -> ``pack`` to token files -> ``train`` -> ``evaluate`` ->
``export``.

Run ``python -m recipes.tiny_python --help`` in the repository's root.
"""
