"""The owner's side of the cpu_worker process: protocol, shared memory, process, supervision, jobs.

Nothing here knows SGLang or any model; rows, routes and results are plain torch tensors.
"""
