"""Estimates of a layout's memory and step time. Pure: no torch, no megatron, no process group."""
