"""Inputs of ``LlmExecutorInterface``: LiteRT-LM's ``ExecutorInputs`` and ``ModelAssets``.

Letters: B batch rows, S tokens of the longest row, M rows of media embeddings, L layers, E width.

Token ids are int32 or int64. Negative ids are placeholders, legal only with their data. Each
``VISION_PLACEHOLDER`` is one row of the vision embeddings and each ``AUDIO_PLACEHOLDER`` one of the
audio embeddings, in order through the batch. Each ``END_OF_IMAGE`` and ``END_OF_AUDIO`` is one more
token, with the same embedding everywhere. The executor checks ids >= 0, because it knows the
vocabulary. A constructed value is consistent; each verb refuses unfit ones (no tokens, two tokens).

Embeddings replace the rows of the model's own table, at the model's width: encoder and projection
have run, and any factor that the model applies to its embeddings is included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from mmap import mmap
from os import PathLike
from typing import BinaryIO, ClassVar, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from quire.base.errors import InvalidArgument, NotFound
from quire.base.signatures import checks_arguments

T = TypeVar("T")

VISION_PLACEHOLDER = -1
AUDIO_PLACEHOLDER = -2
END_OF_IMAGE = -3
END_OF_AUDIO = -4


def check_token_ids(name: str, ids: Tensor) -> None:
    """Raise ``InvalidArgument`` unless ``ids`` is int32 or int64; a float cannot hold every id."""
    if ids.dtype not in (torch.int32, torch.int64):
        raise InvalidArgument(f"{name} must be int32 or int64; got {ids.dtype}")


@checks_arguments()
@dataclass(frozen=True, kw_only=True, eq=False)
class TextData:
    """Token ids of a batch, padded on the right up to S if ``row_lengths`` are given."""

    token_ids: Tensor
    """int32 or int64 ``[B, S]``."""
    row_lengths: tuple[int, ...] | None = None
    """Real tokens of each row, 1..S; None: all rows have S."""

    def __post_init__(self) -> None:
        check_token_ids("token_ids", self.token_ids)
        if self.token_ids.dim() != 2:
            raise InvalidArgument(f"token_ids must be [batch, tokens]; got shape {list(self.token_ids.shape)}")
        if self.row_lengths is None:
            return
        rows, longest = self.token_ids.shape
        if len(self.row_lengths) != rows or not all(1 <= length <= longest for length in self.row_lengths):
            allowed = f"{rows} lengths in 1..{longest}, one per row"
            raise InvalidArgument(field="row_lengths", given=self.row_lengths, allowed=allowed)

    @property
    def batch_size(self) -> int:
        return self.token_ids.shape[0]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Real tokens of each row."""
        return self.row_lengths or (self.token_ids.shape[1],) * self.batch_size

    def token_rows(self) -> tuple[Tensor, ...]:
        """Return the real tokens of each row, int64, 1-D, fresh."""
        return tuple(
            row[:length].to(torch.int64, copy=True) for row, length in zip(self.token_ids, self.lengths, strict=True)
        )


@checks_arguments()
@dataclass(frozen=True, kw_only=True, eq=False)
class _MediaData:
    """Embeddings of images or sounds, one row per placeholder."""

    kind: ClassVar[str]
    embeddings: Tensor | None = None
    """Floating ``[M, E]``."""
    per_layer_embeddings: Tensor | None = None
    """Floating ``[L, M, per_layer_dim]``."""
    end_embedding: Tensor | None = None
    """(ours) Floating ``[E]``: the embedding of ``END_OF_IMAGE`` or ``END_OF_AUDIO``; required if
    such a token occurs."""

    def __post_init__(self) -> None:
        for name, rank in (("embeddings", 2), ("per_layer_embeddings", 3), ("end_embedding", 1)):
            tensor = getattr(self, name)
            if tensor is not None and (tensor.dim() != rank or not tensor.is_floating_point()):
                allowed = f"a floating tensor of rank {rank}"
                raise InvalidArgument(field=f"{self.kind}.{name}", given=tensor, allowed=allowed)
        rows, per_layer = self.embeddings, self.per_layer_embeddings
        if rows is not None and per_layer is not None and rows.shape[0] != per_layer.shape[1]:
            raise InvalidArgument(
                f"{self.kind} embeddings have {rows.shape[0]} rows, per-layer ones {per_layer.shape[1]}; "
                "they must have the same"
            )

    @property
    def num_rows(self) -> int:
        """M, the number of placeholders that this data fills."""
        if self.embeddings is not None:
            return self.embeddings.shape[0]
        return 0 if self.per_layer_embeddings is None else self.per_layer_embeddings.shape[1]


@checks_arguments()
@dataclass(frozen=True, kw_only=True, eq=False)
class VisionData(_MediaData):
    """Embeddings of image tokens, one row per ``VISION_PLACEHOLDER``."""

    kind = "vision"
    bidirectional: bool = False
    """(ours) Whether the tokens of an image see all of that image, not only the tokens before. An
    image is a run of placeholders in one row; any other token ends it."""


@checks_arguments()
@dataclass(frozen=True, kw_only=True, eq=False)
class AudioData(_MediaData):
    """Embeddings of audio tokens, one row per ``AUDIO_PLACEHOLDER``."""

    kind = "audio"
    valid_tokens: int = -1
    """Number of leading rows in use; -1: all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        rows = super().num_rows
        if not -1 <= self.valid_tokens <= rows:
            raise InvalidArgument(f"valid_tokens must be -1 (all) or 0..{rows}; got {self.valid_tokens}")

    @property
    def num_rows(self) -> int:
        """Rows in use, the number of placeholders that this data fills."""
        return self.valid_tokens if self.valid_tokens >= 0 else super().num_rows


@checks_arguments()
@dataclass(frozen=True, kw_only=True, eq=False)
class ExecutorInputs:
    """Text, vision and audio of one call, each optional, and its start position in the cache.
    Absent fields are None; their ``get_...`` accessors raise ``NotFound``."""

    text: TextData | None = None
    vision: VisionData | None = None
    audio: AudioData | None = None
    next_position: int | tuple[int, ...] | None = None
    """First token's position, for all rows or per row; None: the cache's length; lower: a
    rewind."""

    def __post_init__(self) -> None:
        given = self.next_position
        positions = () if given is None else given if isinstance(given, tuple) else (given,)
        if any(p < 0 for p in positions):
            raise InvalidArgument(f"next_position must be an integer >= 0, or a tuple of one per row; got {given!r}")
        if isinstance(given, tuple) and self.text is not None and len(given) != self.text.batch_size:
            raise InvalidArgument(
                f"next_position has {len(given)} entries for {self.text.batch_size} rows of token ids"
            )
        if self.text is not None:
            self._check_placeholders(self.text)

    def _check_placeholders(self, text: TextData) -> None:
        ids = torch.cat([torch.empty(0, dtype=torch.int64, device=text.token_ids.device), *text.token_rows()])
        negative = ids[ids < 0].tolist()
        for kind, data, placeholder, end in (
            ("vision", self.vision, VISION_PLACEHOLDER, END_OF_IMAGE),
            ("audio", self.audio, AUDIO_PLACEHOLDER, END_OF_AUDIO),
        ):
            count = negative.count(placeholder)
            num_rows = 0 if data is None else data.num_rows
            if count != num_rows:
                raise InvalidArgument(f"{count} {kind} placeholders ({placeholder}) for {num_rows} rows of {kind} data")
            if data is None and end in negative:
                raise InvalidArgument(f"token id {end} ends {kind} data, and there is none")
        unknown = set(negative) - {VISION_PLACEHOLDER, AUDIO_PLACEHOLDER, END_OF_IMAGE, END_OF_AUDIO}
        if unknown:
            raise InvalidArgument(f"token ids {sorted(unknown)} are negative and no placeholders; -1..-4 are")

    def start_positions(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """Return the start position of each row in a cache with these row lengths.
        ``InvalidArgument`` unless there is one position, or one per row, each in 0..length of its
        row."""
        given = self.next_position
        if given is None:
            return tuple(lengths)
        positions = given if isinstance(given, tuple) else (given,) * len(lengths)
        if len(positions) != len(lengths):
            raise InvalidArgument(f"next_position has {len(positions)} entries for a cache of {len(lengths)} rows")
        for row, (position, length) in enumerate(zip(positions, lengths, strict=True)):
            if position > length:
                raise InvalidArgument(
                    f"next_position {position} of row {row} must be in 0..{length}, the cache's length"
                )
        return positions

    def get_text_data(self) -> TextData:
        """Return the text; ``NotFound`` if absent."""
        return _present("text data", self.text)

    def get_text_token_ids(self) -> Tensor:
        """Return token ids ``[B, S]``; ``NotFound`` without text."""
        return self.get_text_data().token_ids

    def get_vision_data(self) -> VisionData:
        """Return the vision data; ``NotFound`` if absent."""
        return _present("vision data", self.vision)

    def get_vision_embeddings(self) -> Tensor:
        """Return ``[M, E]``; ``NotFound`` if absent."""
        return _present("vision embeddings", self.get_vision_data().embeddings)

    def get_vision_per_layer_embeddings(self) -> Tensor:
        """Return ``[L, M, per_layer_dim]``; ``NotFound`` if absent."""
        return _present("vision per-layer embeddings", self.get_vision_data().per_layer_embeddings)

    def get_audio_data(self) -> AudioData:
        """Return the audio data; ``NotFound`` if absent."""
        return _present("audio data", self.audio)

    def get_audio_embeddings(self) -> Tensor:
        """Return the rows in use, ``[M, E]``; ``NotFound`` if absent."""
        audio = self.get_audio_data()
        return _present("audio embeddings", audio.embeddings)[: audio.num_rows]

    def get_audio_per_layer_embeddings(self) -> Tensor:
        """Return the rows in use, ``[L, M, per_layer_dim]``; ``NotFound`` if absent."""
        audio = self.get_audio_data()
        return _present("audio per-layer embeddings", audio.per_layer_embeddings)[:, : audio.num_rows]


def _present(name: str, value: T | None) -> T:
    if value is None:
        raise NotFound(f"the inputs have no {name}")
    return value


AssetSource: TypeAlias = Literal["path", "file", "data", "stream"]
SOURCES: tuple[AssetSource, ...] = ("path", "file", "data", "stream")


@checks_arguments()
@dataclass(frozen=True, kw_only=True, eq=False)
class ModelAssets:
    """The source of the bytes of a model or an adapter: exactly one of four."""

    path: str | PathLike[str] | None = None
    """A file or a directory."""
    file: BinaryIO | None = None
    """An open seekable file, read from its beginning to its end, whatever its present position."""
    data: bytes | bytearray | memoryview | mmap | None = None
    """Bytes in memory, or memory-mapped."""
    stream: BinaryIO | None = None
    """A stream, read once from its present position to its end."""

    def __post_init__(self) -> None:
        given = [name for name in SOURCES if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidArgument(
                f"model assets need exactly one of path, file, data, stream; got {', '.join(given) or 'none'}"
            )
        if self.path is not None and not str(self.path):
            raise InvalidArgument(f"model assets: path must be the path of a file or directory; got {self.path!r}")
        if self.file is not None and not (self.file.readable() and self.file.seekable()):
            raise InvalidArgument("model assets: file must be open for reading and seekable; give a stream otherwise")
        if self.stream is not None and not self.stream.readable():
            raise InvalidArgument("model assets: stream must be readable")

    @property
    def source(self) -> AssetSource:
        """The name of the field that was given."""
        return next(name for name in SOURCES if getattr(self, name) is not None)
