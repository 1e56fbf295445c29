"""Channels (``contracts.channel``): they carry a state to another process while it is computed.

``pair`` in one process; ``stream``, frames over a socket; ``greeting``, by which two ends prove
that they know one secret; ``sealed``, encryption; ``ring``, shared memory beside a Unix socket;
``place``, an address; ``urls``, connecting to an address and listening there.
"""
