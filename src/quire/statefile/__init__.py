"""The state file (``.quire``): metadata and named tensors in a checked safetensors container.

``schema``: the metadata of sequences. ``header``: encoding, and all checks of what is read.
``container``: writing and reading. ``atomic_file``: files that appear complete, or not at all.
``docs/statefile.md`` describes the format.
"""
