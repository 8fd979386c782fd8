"""Estimates of a layout's memory and step time.

Pure: imports neither torch nor megatron, and needs no process group.
"""
