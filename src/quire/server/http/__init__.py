"""The application: what every request passes.

``app``, ``serving``, ``listeners``: the application, its process, its sockets. ``gate`` over
``sites``, ``bodies``: who may ask for how much. ``errors``, ``events``, ``status``, ``logs``,
``spans``: what is answered and written down.
"""
