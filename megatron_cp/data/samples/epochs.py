"""Length of a run in passes over its training data."""

from __future__ import annotations

import logging
import math
from typing import cast

from megatron_cp.config.names import NAME
from megatron_cp.config.run_config import DatasetConfig, TrainConfig
from megatron_cp.data.samples.contents import HasSources
from megatron_cp.data.samples.datasets import build_datasets
from megatron_cp.data.text.tokenizers import Tokenizer

logger = logging.getLogger(__name__)


def iterations_of_epochs(train: TrainConfig, data: DatasetConfig, tokenizer: Tokenizer) -> int:
    """Count the iterations of ``train.train_epochs``, rounded up, and log them.

    Collective. An epoch has as many samples as all training files together, also if a blend's weights take other shares
    of them. A run that trains nothing does not open the data.

    Raises:
        DataError: as :func:`megatron_cp.data.samples.datasets.build_datasets`.
    """
    if train.skip_train:
        return 1
    epochs, batch = train.train_epochs or 0.0, train.global_batch_size
    # The run opens the data again, with the number of samples that this one finds, and then reports.
    dataset = cast(HasSources, build_datasets(data, tokenizer, train_samples=1, reports=False).train)
    samples = sum(source.samples for source in dataset.sources())
    wanted = round(epochs * samples, 6)  # not rounded up for the last digit of a product
    iterations = max(1, math.ceil(wanted / batch))
    beyond = iterations * batch - wanted
    more = f", the last one with {beyond:,.6g} samples more" if beyond else ""
    logger.info(
        f"{NAME.train.train_epochs}={epochs:g}: {wanted:,.8g} samples ({samples:,.8g} an epoch), "
        f"{iterations:,} iterations of {batch}{more}"
    )
    return iterations
