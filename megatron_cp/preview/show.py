"""A seen step as lines for a terminal, and as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from rich.console import Console
from rich.text import Text

from megatron_cp.common.errors import format_ranks, join_limited
from megatron_cp.common.terminal import in_a_line, printable
from megatron_cp.data.text.tokenizers import Tokenizer
from megatron_cp.dynamic_cp.types import Group
from megatron_cp.preview.step import SeenSample, SeenStep
from megatron_cp.preview.text import Piece, pieces_of

_INDENT = " " * 6
_MOST_GROUPS = 32
_MOST_NAMED = 8  # samples of a group, documents of a sample
_LEARNED, _NOT_LEARNED, _LEFT_OUT, _BORDER = "bold green", "dim", "cyan", "yellow"
_MARKS = ("⟦", "⟧")


class StepView:
    """A step with its texts.

    Args:
        most: tokens to show of a sample; None shows all, and every group.
        is_packed: whether a sample is a single document; otherwise end-of-document tokens separate documents.
    """

    def __init__(self, step: SeenStep, tokenizer: Tokenizer, most: int | None, *, is_packed: bool) -> None:
        self._step, self._tokenizer, self._most, self._is_packed = step, tokenizer, most, is_packed

    def as_dict(self) -> dict[str, Any]:
        """Return the step as plain data, for ``--json``, with whole texts."""
        step = self._step
        return {
            "summary": self.figures(),
            "microbatches": [
                [
                    {
                        "ranks": step.ranks(group),
                        "cp_size": group.cp_size,
                        "samples": [step.samples[i].number for i in group.sample_ids],
                        "padding": self._padding(group),
                    }
                    for group in groups
                ]
                for groups in step.schedule.microbatches
            ],
            "samples": [self._sample_as_dict(sample) for sample in step.samples],
        }

    def _sample_as_dict(self, sample: SeenSample) -> dict[str, Any]:
        found = {
            "sample": sample.number,
            "file": sample.origin.name,
            "documents": list(sample.origin.documents),
            "start": sample.origin.start,
            "tokens": sample.tokens,
            "loss_tokens": sample.loss_tokens,
        }
        if sample.ids is None:
            return found
        return found | {"pieces": [each._asdict() for each in self._pieces(sample, None)]}

    def figures(self) -> dict[str, Any]:
        """Return the step's counts."""
        step = self._step
        lengths = [sample.tokens for sample in step.samples]
        return {
            "samples": len(lengths),
            "tokens": sum(lengths),
            "loss_tokens": sum(sample.loss_tokens for sample in step.samples),
            "padding": sum(self._padding(group) for groups in step.schedule.microbatches for group in groups),
            "shortest": min(lengths),
            "median": median(lengths),
            "longest": max(lengths),
        }

    def print(self, console: Console) -> None:
        """Print microbatches, groups, texts and counts."""
        for line in self._lines(marked=console.color_system is None or console.no_color):
            console.print(line, soft_wrap=True)

    def _lines(self, marked: bool) -> Iterator[Text]:
        yield Text("text in the loss: ") + (Text("⟦in brackets⟧") if marked else Text("green", _LEARNED))
        step, printed = self._step, 0
        rows = step.schedule.microbatches
        total = sum(map(len, rows))
        for number, groups in enumerate(rows, 1):
            if self._most is not None and printed >= _MOST_GROUPS:
                break
            yield Text(f"microbatch {number} of {len(rows)}", "bold")
            for group in groups:
                yield Text(f"  {self._group_line(group)}")
                printed += 1
                for sample in (step.samples[i] for i in group.sample_ids):
                    if sample.ids is not None:
                        yield Text(f"    {_sample_line(sample)}", "bold")
                        yield self._body(sample, marked)
        if printed < total:
            yield Text(f"{total - printed} more packs or microbatches of ranks. To show them: --full")
        yield from map(Text, self._summary())

    def _group_line(self, group: Group) -> str:
        samples = [self._step.samples[i] for i in group.sample_ids]
        tokens, learned = sum(s.tokens for s in samples), sum(s.loss_tokens for s in samples)
        named = join_limited([str(sample.number) for sample in samples], ", ", most=_MOST_NAMED)
        facts = [f"{tokens:,} tokens", f"{_percent(learned, tokens)} in the loss"]
        facts += [f"{self._padding(group):,} padding"] if self._is_packed else []
        return f"{format_ranks(self._step.ranks(group))} (cp {group.cp_size}): samples {named} | {', '.join(facts)}"

    def _body(self, sample: SeenSample, marked: bool) -> Text:
        text = Text(_INDENT)
        for piece in self._pieces(sample, self._most):
            shown = printable(piece.text).replace("\n", f"\n{_INDENT}")
            if piece.learned is None:
                text.append(f"[… {shown} …]", _LEFT_OUT)
            elif piece.learned:
                begin, end = _MARKS if marked else ("", "")
                text.append(f"{begin}{shown}{end}", _LEARNED)
            else:
                text.append(shown, _NOT_LEARNED)
            if piece.ends:
                text.append(f"\n{_INDENT}── next document ──\n{_INDENT}", _BORDER)
        return text

    def _pieces(self, sample: SeenSample, most: int | None) -> list[Piece]:
        assert sample.ids is not None and sample.learned is not None
        return pieces_of(sample.ids, sample.learned, self._tokenizer, most, has_documents=not self._is_packed)

    def _summary(self) -> Iterator[str]:
        found = self.figures()
        in_loss = f"{found['loss_tokens']:,} in the loss ({_percent(found['loss_tokens'], found['tokens'])})"
        padding = f", {found['padding']:,} padding ({_percent(found['padding'], found['tokens'])})"
        yield f"step: {found['samples']:,} samples, {found['tokens']:,} tokens, {in_loss}" + padding * self._is_packed
        shortest, middle, longest = found["shortest"], found["median"], found["longest"]
        yield f"lengths: shortest {shortest:,}, median {middle:,.6g}, longest {longest:,} tokens"

    def _padding(self, group: Group) -> int:
        return self._step.padding(group) if self._is_packed else 0


def _sample_line(sample: SeenSample) -> str:
    origin = sample.origin
    named = join_limited([f"{number:,}" for number in origin.documents], ", ", most=_MOST_NAMED)
    where = f"document{'s' * (len(origin.documents) > 1)} {named}"
    begin = f", from token {origin.start:,}" if origin.start else ""
    counts = f"{sample.tokens:,} tokens, {sample.loss_tokens:,} in the loss"
    return f"sample {sample.number:,}: {in_a_line(origin.name or 'mock')}, {where}{begin} | {counts}"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / (whole or 1):.3g} %"
