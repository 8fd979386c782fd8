"""All changes to megatron-core's behaviour.

``hook`` prepares megatron-core while it is imported. ``cpu`` makes it run without CUDA. ``packages`` reports broken GPU
packages. ``patches`` repairs 0.19.2, and ``in_place`` leaves out copies on CPUs. Nothing here imports torch or
megatron before megatron-core is imported.
"""
