"""Channels (``contracts.channel``), over which a state goes to another one while it is computed.

``pair`` in one process; ``stream``, frames over a socket; ``greeting``, by which two ends prove
that they know one secret; ``sealed``, encryption; ``ring``, shared memory beside a Unix socket;
``place``, an address; ``urls``, where two ends meet.
"""
