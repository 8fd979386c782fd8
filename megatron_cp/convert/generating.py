"""Generate text with a Hugging Face folder, by transformers' ``generate``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, TextStreamer
from transformers.utils.logging import disable_progress_bar

from megatron_cp.common.errors import ConfigError, DataError, RuntimeFault, first_line
from megatron_cp.convert.hf_folder import PublishedWeights, read_config
from megatron_cp.convert.origin import tokenizer_of
from megatron_cp.data.text.chat_template import ChatTemplate
from megatron_cp.data.text.dialogues import BadDialogue
from megatron_cp.data.text.tokenizer_files import CHAT_TEMPLATE
from megatron_cp.data.text.tokenizers import HuggingFaceTokenizer, Tokenizer, build_tokenizer
from megatron_cp.models.families import model_from_hf


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. ``temperature`` 0 takes the most probable token."""

    max_new_tokens: int
    temperature: float
    top_p: float | None
    top_k: int | None
    seed: int


class TextModel:
    """Model and tokenizer of a folder.

    ``positions``: tokens of the longest text, with the prompt.

    Raises:
        ConfigError, DataError: a file is missing, damaged or not supported.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        _, model = model_from_hf(read_config(folder, PublishedWeights(folder).shapes))
        self.positions, self._rows = model.max_position_embeddings or 0, model.vocab_size or 0
        self._tokenizer = build_tokenizer(tokenizer_of(folder))
        self.has_tokenizer_files = isinstance(self._tokenizer, HuggingFaceTokenizer)
        self._model: Any = None

    def encode(self, prompt: str, chat: bool) -> list[int]:
        """Return a prompt's tokens: a document's beginning, or in a chat a user's turn.

        Raises:
            ConfigError: there is no chat template, or the model cannot continue the prompt.
            DataError: the tokenizer cannot read the prompt.
        """
        if chat:
            ids = self._tokenizer.tokenize(self._as_a_turn(prompt))
        else:
            ids = [*self._tokenizer.prefix, *self._tokenizer.tokenize(prompt)]
        shown = repr(prompt if len(prompt) <= 40 else f"{prompt[:40]}…")
        if not ids:
            raise ConfigError(f"prompt {shown}: has no tokens. Fix: write another text")
        if len(ids) >= self.positions:
            raise ConfigError(
                f"prompt {shown}: has {len(ids)} tokens, and the model has {self.positions} positions for prompt and "
                f"text. Fix: a prompt of at most {self.positions - 1} tokens"
            )
        if max(ids) >= self._rows:
            raise ConfigError(
                f"{self._folder}: the tokenizer gives token {max(ids)}, and the model has {self._rows}. Fix: copy the "
                "model's own tokenizer files into this folder"
            )
        return ids

    def _as_a_turn(self, prompt: str) -> str:
        file = self._folder / CHAT_TEMPLATE
        if not (file.is_file() or self._tokenizer.has_chat_template):
            raise ConfigError(f"--chat: {self._folder} has no chat template. Fix: leave out --chat")
        try:
            return ChatTemplate(self._tokenizer, str(file) if file.is_file() else None).user_turn(prompt)
        except (BadDialogue, DataError) as error:
            reason = first_line(error).partition(" Fix: ")[0].rstrip(".")
            raise ConfigError(
                f"--chat: the chat template of {self._folder} failed: {reason}. Fix: leave out --chat"
            ) from error

    def load(self) -> None:
        """Load the weights, onto the GPU if there is one.

        Raises:
            ConfigError: weights and ``config.json`` do not fit each other.
            RuntimeFault: the GPU's memory is too small.
        """
        loader: Any = AutoModelForCausalLM
        if not sys.stderr.isatty():
            disable_progress_bar()
        try:
            self._model, found = loader.from_pretrained(
                self._folder,
                dtype="auto",
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
        except Exception as error:  # damaged files raise errors of many types
            raise ConfigError(f"{self._folder}: cannot be read as a model: {first_line(error)}") from error
        if wrong := sorted(map(str, (*found["missing_keys"], *found["mismatched_keys"]))):
            raise ConfigError(f"{self._folder}: config.json does not match the weights: {', '.join(wrong[:4])}")
        with self._memory():
            self._model.to("cuda" if torch.cuda.is_available() else "cpu").eval()

    def describe(self) -> str:
        """Return the device and the dtype of the loaded weights."""
        return f"{self._model.device}, {str(self._model.dtype).removeprefix('torch.')}"

    def generate(self, ids: Sequence[int], sampling: Sampling, show: Callable[[str], None]) -> list[int]:
        """Continue a prompt's tokens; ``show`` receives the text in pieces.

        Stops after an end token, after ``max_new_tokens``, or at the model's last position. The text depends on the
        prompt and the seed, not on earlier prompts.

        Raises:
            RuntimeFault: the model's output is not a number, or the GPU's memory is too small.
        """
        ends = self._model.generation_config.eos_token_id
        ends = [self._tokenizer.eod] if ends is None else ends if isinstance(ends, list) else [ends]
        chosen = GenerationConfig(
            max_new_tokens=min(sampling.max_new_tokens, self.positions - len(ids)),
            do_sample=sampling.temperature > 0,
            temperature=sampling.temperature or None,
            top_p=sampling.top_p,
            top_k=sampling.top_k or 0,  # 0: all tokens; transformers' default is 50
            eos_token_id=ends,
            pad_token_id=ends[0],
        )
        torch.manual_seed(sampling.seed)
        prompt = torch.tensor([ids], device=self._model.device)
        with self._memory(), torch.no_grad():
            generated = self._model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=chosen,
                logits_processor=[self._check_numbers],
                streamer=_Streamer(self._tokenizer, show),
            )
        return generated[0, len(ids) :].tolist()

    def _check_numbers(self, ids: Tensor, scores: Tensor) -> Tensor:
        """Raise RuntimeFault for nan.

        Greedy choice would silently take some token; sampling would abort CUDA.
        """
        if scores.isnan().any():
            raise RuntimeFault(f"{self._folder}: the model computes nan. Fix: choose an earlier checkpoint")
        return scores

    @contextmanager
    def _memory(self) -> Iterator[None]:
        """Name the folder, and what to type, in errors of the GPU's memory."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise RuntimeFault(
                f"{self._folder}: does not fit into the GPU's memory: {first_line(error)}. Fix: CUDA_VISIBLE_DEVICES= "
                "before the command (on the CPU), or serve it on several GPUs with vllm serve "
                f"{shlex.quote(str(self._folder))} --tensor-parallel-size 8"
            ) from error


class _Streamer(TextStreamer):
    """Decode with the run's tokenizer, and hand on the text of whole words."""

    def __init__(self, tokenizer: Tokenizer, show: Callable[[str], None]) -> None:
        super().__init__(cast(Any, self), skip_prompt=True)
        self._text_of, self._size, self._show = tokenizer.decode, tokenizer.vocab_size, show

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens; rows that pad the model's vocabulary have none."""
        return self._text_of([token for token in ids if token < self._size])

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._show(text)
