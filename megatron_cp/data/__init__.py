"""Turn text into microbatches: tokenizers, indexed files, datasets and batches.

``text`` tokenizes text into ``.bin``/``.idx`` files, ``formats`` reads data files, and ``samples`` builds datasets from
them or from mock data. ``batch_iterator`` assigns samples to data-parallel ranks and slices batches for context
parallelism.
"""
