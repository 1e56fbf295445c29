"""Several servers of one model behind one address.

``calls``: a request and its answer as values, and the ``Replicas`` that take them. ``router``:
which replica takes a request. ``front``: the ASGI application that clients speak to.
``replica_process``: a server as a child process; ``local``: such replicas on this machine;
``ray_serve``: replicas and the front as deployments of Ray Serve.
"""
