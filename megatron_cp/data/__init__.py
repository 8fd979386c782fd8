"""Text in, microbatches out: tokenizers, Megatron indexed data, mock data, and the order in which samples are dealt.

``tokenizers`` and ``preprocess`` make ``.bin``/``.idx`` files of text; ``datasets`` opens them (or makes mock samples);
``batches`` deals the samples to data-parallel ranks and slices a batch along the sequence for context parallelism.
"""
