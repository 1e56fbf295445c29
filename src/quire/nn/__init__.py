"""Layers: objects that hold tensors. They see a pass, never the state behind it.

``linear``, ``packed``: linear maps, plain and in a kernel's layout. ``attention``, ``latent``,
``delta``, ``mamba``, ``short_conv``: what mixes tokens. ``mlp``, ``experts``, ``norm``,
``embedding``: the rest of a block.
"""
