"""Draw the pictures of docs/explanation/context_parallel.md.

The pictures are written next to this file.

    python docs/pictures/attention.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle

from megatron_cp.attention.sharding import Layout
from megatron_cp.attention.tiles import Kind, Mask, TileSize, plan

FOLDER = Path(__file__).parent
RANK_COLORS = ("#4C78A8", "#F58518", "#54A24B", "#B279A2")
STOP_COLORS = ("#1B4F72", "#2E86C1", "#85C1E9", "#D6EAF8")
RANKS, CHUNKS, UNIT = 4, 8, 4


def owner(chunk: int) -> int:
    return min(chunk, CHUNKS - 1 - chunk)


def figure(width: float, height: float, columns: int = 1) -> tuple[plt.Figure, list[Axes]]:
    drawing, axes = plt.subplots(1, columns, figsize=(width, height), squeeze=False)
    for axis in axes[0]:
        axis.set_aspect("equal")
        axis.axis("off")
    return drawing, list(axes[0])


def save(drawing: plt.Figure, name: str) -> None:
    drawing.tight_layout()
    drawing.savefig(FOLDER / f"{name}.svg", metadata={"Date": None})
    plt.close(drawing)


def cell(axis: Axes, x: float, y: float, color: str, text: str = "", width: float = 1, height: float = 1) -> None:
    axis.add_patch(Rectangle((x, y), width, height, facecolor=color, edgecolor="white", linewidth=1.5))
    dark = color in STOP_COLORS[:2] or color in RANK_COLORS
    axis.text(
        x + width / 2, y + height / 2, text, ha="center", va="center", color="white" if dark else "black", fontsize=8
    )


def arrow(axis: Axes, start: tuple[float, float], end: tuple[float, float], bend: float = 0.0) -> None:
    axis.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=12, connectionstyle=f"arc3,rad={bend}", color="#555555"
        )
    )


def zigzag() -> None:
    """Draw which rank holds which chunk of the sequence."""
    drawing, (axis,) = figure(7, 1.6)
    for chunk in range(CHUNKS):
        cell(axis, chunk, 0, RANK_COLORS[owner(chunk)], f"{chunk}")
    for rank in range(RANKS):
        cell(axis, 2 * rank, -1.6, RANK_COLORS[rank], f"rank {rank}: {rank}, {CHUNKS - 1 - rank}", width=2)
    axis.set_xlim(-0.1, CHUNKS + 0.1)
    axis.set_ylim(-1.8, 1.2)
    axis.set_title("a sequence in eight chunks over four ranks", fontsize=9)
    save(drawing, "zigzag")


def score_matrix(axis: Axes, colors: dict[tuple[int, int], tuple[str, str]], title: str) -> None:
    """Draw query chunks down and key chunks across.

    ``{(query, key): (color, text)}``; all other cells are masked.
    """
    for query in range(CHUNKS):
        for key in range(CHUNKS):
            color, text = colors.get((query, key), ("#F4F4F4", ""))
            cell(axis, key, CHUNKS - 1 - query, color, text)
        axis.text(-0.2, CHUNKS - 0.5 - query, f"{query}", ha="right", va="center", fontsize=8)
        axis.text(query + 0.5, CHUNKS + 0.3, f"{query}", ha="center", va="center", fontsize=8)
        axis.add_patch(Rectangle((CHUNKS + 0.15, CHUNKS - 1 - query), 0.35, 1, color=RANK_COLORS[owner(query)]))
    axis.text(CHUNKS / 2, CHUNKS + 1.0, title, ha="center", fontsize=9)
    axis.set_xlim(-0.8, CHUNKS + 0.7)
    axis.set_ylim(-0.2, CHUNKS + 1.6)


def computed(stop: int | None) -> dict[tuple[int, int], int]:
    """Return {(query chunk, key chunk): stop of the ring at which it is computed}.

    The plan is the one that runs.
    """
    layout, result = Layout.dense(CHUNKS * UNIT, RANKS), {}
    for rank in range(RANKS):
        for distance in range(RANKS) if stop is None else [stop]:
            source = (rank - distance) % RANKS
            for tile in plan(layout, rank, source, Mask(None, 0), TileSize()):
                assert tile.kind in (Kind.FULL, Kind.CAUSAL)
                for row in range(tile.q_row, tile.q_row + tile.q_length, UNIT):
                    for column in range(tile.k_row, tile.k_row + tile.k_length, UNIT):
                        if tile.kind is Kind.FULL or row - tile.q_row >= column - tile.k_row:
                            pair = _chunk(rank, row), _chunk(source, column)
                            result[pair] = distance
    return result


def _chunk(rank: int, row: int) -> int:
    return rank if row < UNIT else CHUNKS - 1 - rank


def p2p() -> None:
    drawing, (matrix, ring) = figure(8, 4.2, columns=2)
    stops = {pair: (STOP_COLORS[stop], f"{stop}") for pair, stop in computed(None).items()}
    score_matrix(matrix, stops, "scores (query down, key across): at which stop")
    places = [(0, 3), (3, 3), (3, 0), (0, 0)]
    for rank, (x, y) in enumerate(places):
        cell(ring, x, y, RANK_COLORS[rank], f"rank {rank}\nQ stays", width=1.6, height=1.2)
    for start, end in (
        ((1.7, 3.6), (2.9, 3.6)),
        ((3.8, 2.9), (3.8, 1.3)),
        ((2.9, 0.6), (1.7, 0.6)),
        ((0.8, 1.3), (0.8, 2.9)),
    ):
        arrow(ring, start, end)
    ring.text(2.3, 2.1, "K, V hop on while\nthe rank computes", ha="center", va="center", fontsize=9)
    ring.set_xlim(-0.3, 5)
    ring.set_ylim(-0.4, 4.8)
    save(drawing, "p2p")


def all_gather() -> None:
    drawing, (matrix, gather) = figure(8, 4.2, columns=2)
    owners = {pair: (RANK_COLORS[owner(pair[0])], "") for pair in computed(None)}
    score_matrix(matrix, owners, "scores: which rank")
    for rank in range(RANKS):
        cell(gather, 0, 3 - rank, RANK_COLORS[rank], f"K, V of {rank}", width=1.5, height=0.9)
        for part in range(RANKS):
            cell(gather, 3.2 + 0.55 * part, 3 - rank, RANK_COLORS[part], f"{part}", width=0.5, height=0.9)
        arrow(gather, (1.6, 3.45 - rank), (3.1, 3.45 - rank))
    gather.text(2.4, 4.3, "one gather, then attention", ha="center", fontsize=9)
    gather.set_xlim(-0.3, 5.6)
    gather.set_ylim(-0.4, 4.8)
    save(drawing, "all_gather")


def heads_by_tokens(axis: Axes, colors: list[list[str]], title: str) -> None:
    """Draw four heads down and four ranks' tokens across."""
    for head, row in enumerate(colors):
        for part, color in enumerate(row):
            cell(axis, part, 3 - head, color)
        axis.text(-0.15, 3.5 - head, f"head {head}", ha="right", va="center", fontsize=8)
    axis.text(2, 4.25, title, ha="center", fontsize=9)
    axis.text(2, -0.4, "tokens", ha="center", fontsize=8)
    axis.set_xlim(-1.2, 4.2)
    axis.set_ylim(-0.9, 4.8)


def a2a() -> None:
    drawing, (before, after) = figure(7, 3.2, columns=2)
    heads_by_tokens(
        before, [[RANK_COLORS[part] for part in range(4)] for _ in range(4)], "each rank: its tokens, all heads"
    )
    heads_by_tokens(after, [[RANK_COLORS[head]] * 4 for head in range(4)], "each rank: all tokens, its heads")
    save(drawing, "a2a")


def a2a_p2p() -> None:
    drawing, (before, after) = figure(7, 3.2, columns=2)
    heads_by_tokens(
        before, [[RANK_COLORS[part] for part in range(4)] for _ in range(4)], "each rank: its tokens, all heads"
    )
    mixed = [[RANK_COLORS[2 * (part // 2) + head // 2] for part in range(4)] for head in range(4)]
    heads_by_tokens(after, mixed, "after the exchange in pairs")
    for y in (2.9, 0.9):
        arrow(after, (1.3, y), (2.7, y), bend=-0.35)
        arrow(after, (2.7, y + 0.2), (1.3, y + 0.2), bend=-0.35)
    after.text(2, -0.75, "(arrows: the ring between pairs)", ha="center", fontsize=8)
    save(drawing, "a2a_p2p")


def main() -> None:
    plt.rcParams["svg.hashsalt"] = "megatron_cp"
    plt.rcParams["font.family"] = "DejaVu Sans"
    for draw in (zigzag, p2p, all_gather, a2a, a2a_p2p):
        draw()


if __name__ == "__main__":
    main()
