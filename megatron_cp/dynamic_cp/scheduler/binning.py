"""Three classical algorithms that distribute weights over bins, each O(n log n)."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np


def best_fit(items: Sequence[int], sizes: Sequence[float], capacity: float) -> list[list[int]]:
    """Pack ``items`` in order, each into the fullest bin with room."""
    bins: list[list[int]] = []
    rooms: list[tuple[float, int]] = []
    for item, size in zip(items, sizes, strict=True):
        k = bisect_left(rooms, (size, -1))
        if k == len(rooms):
            insort(rooms, (capacity - size, len(bins)))
            bins.append([item])
        else:
            room, b = rooms.pop(k)
            bins[b].append(item)
            insort(rooms, (room - size, b))
    return bins


def least_loaded(weights: Sequence[float], loads: Sequence[float], on_last: Sequence[float] | None = None) -> list[int]:
    """Assign each weight, in order, to the bin whose load becomes least.

    Ties go to the first bin. With decreasing weights this is Graham's longest-processing-time-first rule (1969).
    on_last: weights on the last bin, if they differ there.
    """
    last = len(loads) - 1
    regular, load_of_last = (loads, math.inf) if on_last is None else (loads[:last], loads[last])
    heap = [(load, j) for j, load in enumerate(regular)]
    heapq.heapify(heap)
    chosen = []
    for weight, other in zip(weights, weights if on_last is None else on_last, strict=True):
        load, j = heap[0]
        if load_of_last + other < load + weight:
            load_of_last += other
            chosen.append(last)
        else:
            heapq.heapreplace(heap, (load + weight, j))
            chosen.append(j)
    return chosen


def most_room(weights: Sequence[float], tokens: Sequence[float], rooms: Sequence[float], capacity: int) -> list[int]:
    """Assign each weight to the bin with most room and enough capacity, or -1.

    rooms: target seconds of each bin, which may be exceeded. ``tokens`` must not increase.
    """
    heap = [(-room, k) for k, room in enumerate(rooms)]
    heapq.heapify(heap)
    free: list[float] = [capacity] * len(rooms)
    full: list[tuple[float, float, int]] = []
    chosen = []
    for weight, need in zip(weights, tokens, strict=True):
        # A bin without room for a longer sample may have room for this one.
        while full and -full[0][0] >= need:
            _, room, k = heapq.heappop(full)
            heapq.heappush(heap, (room, k))
        while heap and free[heap[0][1]] < need:
            room, k = heapq.heappop(heap)
            heapq.heappush(full, (-free[k], room, k))
        if not heap:
            chosen.append(-1)
            continue
        room, k = heap[0]
        heapq.heapreplace(heap, (room + weight, k))
        free[k] -= need
        chosen.append(k)
    return chosen


def water_level(loads: Sequence[float], volume: float) -> float:
    """Return the level to which ``volume`` fills columns of heights ``loads``."""
    heights = np.sort(np.asarray(loads, dtype=np.float64))
    filled = heights * np.arange(1, len(heights) + 1) - np.cumsum(heights)
    columns = int(np.searchsorted(filled, volume, side="right"))
    return float((volume + heights[:columns].sum()) / columns)
