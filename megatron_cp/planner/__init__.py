"""Layout search: enumerate layouts, estimate memory and time, rank.

Pure: no torch, no GPU.
"""
