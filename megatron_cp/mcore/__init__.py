"""Living with megatron-core: the only room that changes its behaviour.

``hook`` prepares megatron-core while it is imported; ``cpu`` makes it run without CUDA; ``packages`` tells of those for
GPUs that are broken; ``patches`` repairs what 0.19.2 gets wrong or lacks for us. Nothing here imports torch or megatron
until megatron-core itself is imported.
"""
