"""Log the data of a run: a line, a line per blended file, warnings. No torch."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

from megatron_cp.config.names import NAME
from megatron_cp.config.run_config import DatasetConfig, TokenizerConfig, TrainConfig, ValidationConfig
from megatron_cp.data.samples.contents import Contents, HasSources
from megatron_cp.data.samples.split_files import paths_of

if TYPE_CHECKING:
    from megatron_cp.data.samples.datasets import Datasets

logger = logging.getLogger(__name__)
LINE = 160  # characters of the data: line
_STAMP = len("[2026-01-01 00:00:00] ")  # subtracted from LINE for the time stamp, if the numbers leave room
_SHORTEST_NAME = 16
# More passes over the same text add little: Muennighoff et al., "Scaling Data-Constrained Language Models" (2023).
_MOST_EPOCHS = 4
_MOST_FILES = 10  # files of a blend that get a log line each
# A run's config.yaml sets the kind, so a new data_path alone would have no effect.
_REAL_DATA = f"real: {NAME.dataset.kind}=null {NAME.dataset.data_path}=PREFIX"
_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"))


class _Use(NamedTuple):
    """Samples used of one source: by this start (``now``), by all starts (``total``)."""

    source: Contents
    now: float
    total: float

    @property
    def epochs(self) -> float:
        return self.total / self.source.samples

    @property
    def tokens(self) -> float:
        """Tokens of all starts."""
        return self.epochs * self.source.tokens

    @property
    def label(self) -> str:
        """The file, and the class of length."""
        return ", ".join(filter(None, [self.source.name, self.source.lengths]))


class TokensUsed(NamedTuple):
    """Samples that a run uses: training samples [first, last), and evaluation batches."""

    first: int
    last: int
    batch_size: int
    validation: ValidationConfig
    eval_batch_size: int

    def evaluation_samples(self, dataset: HasSources) -> float:
        """Return the samples of ``dataset`` in one evaluation."""
        if self.validation.full_validation:
            return sum(source.samples for source in dataset.sources())
        return self.validation.eval_iters * self.eval_batch_size


def log_data(
    data: DatasetConfig, tokenizer: TokenizerConfig, datasets: Datasets, end_of_document: int, taken: TokensUsed
) -> None:
    """Log the data of a run."""
    mock, uses = _is_mock(data), _uses(datasets, taken)
    logger.log(logging.WARNING if mock else logging.INFO, _data_line(data, datasets, uses, taken.validation.evaluates))
    if not mock or data.length_mixture is not None:
        for line in _file_lines(uses):
            logger.info(line)
    if mock:
        return
    if datasets.train is not None:
        for line in _repeated(uses, taken.batch_size):
            logger.warning(line)
    for line in (*_evaluated_again(data, datasets, taken), *_other_tokenizer(tokenizer, uses, end_of_document)):
        logger.warning(line)


def planned_line(data: DatasetConfig, train: TrainConfig) -> str:
    """Return the ``data:`` line of a dry run; opens no file."""
    if _is_mock(data):
        return f"data: {_mock_name(data)} | {_REAL_DATA}"
    if train.train_iters is None:
        taken = f"{_epochs(_short(train.train_epochs or 0))}: {NAME.train.train_iters} from the data"
    else:
        taken = f"{_number(train.train_iters * train.global_batch_size)} training samples"
    try:
        files = _files(paths_of(data), LINE // 2)
    except ValueError:  # a rule reports the reason
        return f"data: {NAME.dataset.data_path} names no files | {NAME.dataset.kind}={data.kind}"
    return f"data: {files} ({data.kind}) | {taken} | not opened (dry run)"


def _data_line(data: DatasetConfig, datasets: Datasets, uses: Sequence[_Use], evaluates: bool) -> str:
    """Return the ``data:`` line, at most ``LINE`` characters."""
    mock = _is_mock(data)
    facts = [
        *_numbers([use.source for use in uses], mock),
        f"{'run' if datasets.train is not None else 'eval'}: {_epochs_taken(uses, mock)}",
        _REAL_DATA if mock else _held_out(data, datasets, evaluates),
    ]
    rest = "".join(f" | {fact}" for fact in facts)
    room = max(_SHORTEST_NAME, LINE - _STAMP - len("data: ") - len(rest))
    names = [use.source.name for use in uses]
    if data.length_mixture is not None:  # a file has several classes
        names = list(dict.fromkeys(names))
    return f"data: {_mock_name(data) if mock else _files(names, room)}{rest}"


def _file_lines(uses: Sequence[_Use]) -> Iterator[str]:
    """Yield a line per file of a blend or class of a mixture, the most repeated first."""
    if len(uses) < 2:
        return
    samples = sum(use.total for use in uses) or 1
    tokens, drawn = sum(use.source.tokens for use in uses), sum(use.tokens for use in uses) or 1
    most = sorted(uses, key=lambda use: -use.epochs)
    kind, kinds = ("class", "classes") if uses[0].source.lengths else ("file", "files")
    for number, use in enumerate(most[:_MOST_FILES], 1):
        share = f"{_percent(use.total / samples)} of the run's samples"
        if use.source.lengths:
            share = f"{_percent(use.source.tokens / tokens)} of the tokens, {_percent(use.tokens / drawn)} of the run's"
        facts = [*_numbers([use.source], mock=False), share, _epochs(_short(use.epochs))]
        yield " | ".join([f"{kind} {number} of {len(uses)}: {use.label}", *facts])
    if left := most[_MOST_FILES:]:
        yield f"{len(left)} more {kinds}: at most {_epochs(_short(left[0].epochs))} each"


def _repeated(uses: Sequence[_Use], size: int) -> Iterator[str]:
    """Yield a warning if files are repeated more than ``_MOST_EPOCHS`` times."""
    repeated = sorted((use for use in uses if use.epochs > _MOST_EPOCHS), key=lambda use: -use.epochs)
    if not repeated:
        return
    worst, rest = repeated[0], len(repeated) - 1
    taken, last = sum(use.total - use.now for use in uses), sum(use.total for use in uses)
    iterations = int(last * _MOST_EPOCHS / worst.epochs / size)
    shorter = f"{NAME.train.train_iters}={iterations}, or " if iterations * size > taken else ""
    what, kinds, share = f"{NAME.dataset.data_path}={worst.label}: is", "files", ""
    if worst.source.lengths:
        what, kinds = f"{NAME.dataset.length_mixture}: the class '{worst.label}' is", "classes"
        share = f"a smaller share in {NAME.dataset.length_mixture}, or "
    yield (
        f"{what} repeated {_short(worst.epochs)} times by this run"
        f"{f', {rest} more {kinds} more than {_MOST_EPOCHS} times' if rest else ''}; more than {_MOST_EPOCHS} epochs "
        f"improve a model little. Fix: {shorter}{share}more data."
    )


def _evaluated_again(data: DatasetConfig, datasets: Datasets, taken: TokensUsed) -> Iterator[str]:
    """Yield a warning for each held-out part that one evaluation repeats."""
    batch, once = taken.eval_batch_size, ""
    if data.kind in ("documents", "jsonl"):
        once = f"{NAME.validation.full_validation}=true {NAME.validation.eval_iters}=0 (each sample once), or "
    for part, dataset in zip(("validation", "test"), _parts(datasets)[1:], strict=True):
        if dataset is None:
            continue
        wanted, samples = taken.evaluation_samples(dataset), sum(source.samples for source in dataset.sources())
        if samples < wanted:
            fewer = f"{NAME.validation.eval_iters}={int(samples / batch)}, or " if samples >= batch else ""
            yield (
                f"{NAME.validation.eval_iters}={taken.validation.eval_iters}: an evaluation uses {_number(wanted)} "
                f"{part} samples and repeats them, as there are only {_number(samples)}. "
                f"Fix: {fewer}{once}more data for {part}."
            )


def _other_tokenizer(tokenizer: TokenizerConfig, uses: Sequence[_Use], end: int) -> Iterator[str]:
    """Yield a warning for each file whose documents end with another token."""
    if tokenizer.tokenizer_type == "NullTokenizer" and tokenizer.eod_id is None:
        return
    for source in {use.source.name: use.source for use in uses}.values():  # classes of a file have its ends
        if source.ends and end not in source.ends:
            yield (
                f"{NAME.dataset.data_path}={source.name}: none of the first {len(source.ends)} documents ends with "
                f"token {end}, the end-of-document token of {tokenizer.tokenizer_type}; the file may come from another "
                f"tokenizer. Fix: {NAME.tokenizer.tokenizer_type}=HuggingFaceTokenizer "
                f"{NAME.tokenizer.tokenizer_model}=PATH, or end each document with token {end}."
            )


def _uses(datasets: Datasets, run: TokensUsed) -> list[_Use]:
    """Return the use of each training source, or of the first evaluated part."""
    dataset = next((part for part in _parts(datasets) if part is not None), None)
    if dataset is None:
        return []
    first, last = (run.first, run.last) if datasets.train is not None else (0, run.evaluation_samples(dataset))
    taken = zip(dataset.sources(), dataset.taken(first), dataset.taken(int(last)), strict=True)
    return [_Use(source, after - before, after) for source, before, after in taken]


def _parts(datasets: Datasets) -> list[HasSources | None]:
    return cast("list[HasSources | None]", list(datasets))


def _is_mock(data: DatasetConfig) -> bool:
    return data.kind in ("mock", "mock_documents")


def _mock_name(data: DatasetConfig) -> str:
    return f"MOCK DATA (random{f', {_end_of(data.mock_lengths, 12)}' if data.kind == 'mock_documents' else ' tokens'})"


def _numbers(sources: Sequence[Contents], mock: bool) -> list[str]:
    """Return documents, tokens, loss tokens and samples in one epoch of all sources."""
    tokens, counted = sum(s.tokens for s in sources), [s.loss_tokens for s in sources]
    if any(number is None for number in counted):
        loss = "all but EOD"
    else:
        total = sum(number for number in counted if number is not None)
        loss = "all" if total == tokens else f"~{total / tokens:.0%}" if mock else _number(total)
    documents = [s.documents for s in sources if s.documents is not None]
    samples = _number(sum(s.samples for s in sources))
    return [
        *([f"{_number(sum(documents))} documents"] if documents and not mock else []),
        f"{_number(tokens)} tokens, {loss} in loss",
        f"{samples} samples",
    ]


def _held_out(data: DatasetConfig, datasets: Datasets, evaluates: bool) -> str:
    """Describe the validation and test data: shares of the files, or own files."""
    shares = [_share(part) for part in _parts(datasets)]
    if not data.divides:
        own = [
            f"{name} has its own files"
            for name, part in (("validation", datasets.valid), ("test", datasets.test))
            if part is not None
        ]
        return ", ".join(own) or "not evaluated"
    if evaluates:
        return f"validation {_percent(shares[1])}, test {_percent(shares[2])}"
    return f"{_percent(1 - shares[0])} held out, unused" if shares[0] < 1 else "none held out"


def _share(part: HasSources | None) -> float:
    """Return the share of the files' documents that a part has."""
    sources = part.sources() if part is not None else []
    return sum(s.documents or 0 for s in sources) / (sum(s.all_documents or 0 for s in sources) or 1)


def _epochs_taken(uses: Sequence[_Use], mock: bool) -> str:
    """Format the epochs of this start, and of all starts; a blend's as a range."""
    now = sorted(use.now / use.source.samples for use in uses)
    total = max(use.epochs for use in uses)
    least, most = (_short(now[i]) for i in (0, -1))
    if total != now[-1] and not mock:
        return f"{'' if least == most else 'up to '}{most} of {_epochs(_short(total))}"
    return _epochs(most if least == most else f"{least} to {most}")


def _epochs(number: str) -> str:
    return f"{number} epoch{'' if number == '1' else 's'}"


def _short(number: float) -> str:
    """Format a number with three digits, or as an integer from 100."""
    if 0 < number < 0.001:
        return "<0.001"
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"


def _number(number: float) -> str:
    """Format a count; from a million with four digits and a unit."""
    for size, unit in _UNITS:
        if number >= size:
            return f"{number / size:.4g}{unit}"
    return f"{number:,.0f}" if number >= 100 or number == int(number) else f"{number:.3g}"


def _files(names: Sequence[str], room: int) -> str:
    """Return the first name and the number of others in ``room`` characters."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return _end_of(names[0], max(_SHORTEST_NAME - len(more), room - len(more))) + more


def _end_of(name: str, room: int) -> str:
    return name if len(name) <= room else f"…{name[len(name) - room + 1 :]}"
