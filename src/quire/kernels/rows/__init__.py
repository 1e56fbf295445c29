"""Work on rows between products: ``cpu_rows`` in C++, ``triton_rows`` on GPUs; ``checked_rows``:
rows that are compared with their checksums on their way into a pool.
"""
