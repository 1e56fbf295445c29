"""Text to token ids and back, with ``tokenizers`` and the files of a Hugging Face checkpoint.

The files are read as ``transformers`` 5 reads them, without importing it: ``tokenizer.json`` is the
definition, its post-processor decides which special tokens ``encode`` adds, and
``tokenizer_config.json`` names the special tokens. ``decode`` concatenates the tokens' bytes (see
``token_bytes``), so streamed text and text decoded at once are the same.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import tokenizers

from quire.base.errors import CheckpointError, InvalidArgument, NotFound
from quire.base.json_files import read_json
from quire.base.signatures import require_text
from quire.base.token_history import Ids
from quire.text import long_texts
from quire.text.control_tokens import control_tokens, finder
from quire.text.decoder_stream import REPLACEMENT
from quire.text.gguf_tokenizer import FindMerges, merges_of, read_gguf_tokenizer
from quire.text.inner_text import for_inner_text
from quire.text.token_bounds import longest_token
from quire.text.token_bytes import TokenBytes, join_pieces
from quire.text.tokenizer_process import TextEncoder, check_decoder
from quire.weights.gguf_paths import is_gguf

_logger = logging.getLogger(__name__)

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTED_TOKENS = ("additional_special_tokens", "extra_special_tokens")
_OTHER_FORMATS = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "*.tiktoken",
    "vocab.json",
    "vocab.txt",
)
"""Vocabularies that are not in the format of the ``tokenizers`` library."""


class Tokenizer:
    """A checkpoint's tokenizer, special tokens and chat templates. Immutable, thread-safe.

    - ``bos_id``, ``pad_id``: ids, or None; ``eos_ids``: all that end a generation, its own first.
    - ``special_tokens``: texts of the special tokens by name (``"bos_token"`` and so on).
    - ``chat_templates``: Jinja templates by name; ``"default"`` is used if none is named.
    - ``adds_bos``: whether ``encode`` puts a special token first, so that no text is empty.
    - ``token_bytes``: the table of the bytes of each token.
    - ``parse_special``: whether texts of messages that spell special tokens become these.

    ``clean_up_tokenization_spaces`` is not applied: it would change text that has been streamed
    already, and ``transformers`` does not apply it to BPE either.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        bos_id: int | None = None,
        eos_ids: Sequence[int] = (),
        pad_id: int | None = None,
        chat_templates: Mapping[str, str] | None = None,
        size: int | None = None,
    ) -> None:
        """Put a tokenizer around ``backend``, which belongs to it from now on. An id that is not
        given is that of the special token with that name, if the vocabulary has it. ``size``: the
        highest id plus one, if that is known."""
        check_decoder(backend)
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._encoder = TextEncoder(backend)
        self.special_tokens = dict(special_tokens or {})
        self.chat_templates = dict(chat_templates or {})
        self.token_bytes = TokenBytes(backend, size)
        self.parse_special = False
        inner = for_inner_text(backend)
        self._inner = self._encoder if inner is backend else TextEncoder(inner)
        self._prefix = self._special_prefix()
        self.bos_id = self._named_id("bos_token", bos_id)
        if self.bos_id is None and self._prefix:
            self.bos_id = self._prefix[0]
        self.pad_id = self._named_id("pad_token", pad_id)
        named_eos = self._named_id("eos_token", None)
        self.eos_ids = tuple(dict.fromkeys([*([] if named_eos is None else [named_eos]), *eos_ids]))

    @classmethod
    def from_path(cls, path: Path, find_merges: FindMerges = merges_of) -> Tokenizer | None:
        """Return the tokenizer of a checkpoint's directory or of a GGUF file; see
        ``from_directory`` and ``read_gguf_tokenizer``."""
        if not is_gguf(path):
            return cls.from_directory(path)
        found = read_gguf_tokenizer(path, find_merges)
        if found is None:
            return None
        return cls(
            found.backend,
            special_tokens=found.special_tokens,
            eos_ids=found.eos_ids,
            chat_templates=found.chat_templates,
            size=found.size,
        )

    @classmethod
    def from_directory(cls, path: Path) -> Tokenizer | None:
        """Return the tokenizer of a checkpoint's directory; None: the model works with token ids.
        ``NotFound`` if ``path`` is not a directory; ``CheckpointError`` names a damaged file, or a
        vocabulary that has another format than ``tokenizer.json`` only."""
        if not path.is_dir():
            raise NotFound(f"{path} is not a directory; a tokenizer is read from a checkpoint's directory")
        file = path / "tokenizer.json"
        if not file.is_file():
            others = sorted(found.name for pattern in _OTHER_FORMATS for found in path.glob(pattern))
            if not others:
                return None
            raise CheckpointError(
                f"{path} has its vocabulary in {', '.join(others)} only, but a tokenizer.json is needed; {_way(path)}"
            )
        config = _TokenizerFiles.read(path)
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{file} is not a valid tokenizer.json: {error}") from error
        _add_missing_tokens(backend, config)
        _mark_special(backend, config)
        tokenizer = cls(
            backend,
            special_tokens=config.named,
            bos_id=None if "bos_token" in config.named else config.bos_id,
            eos_ids=config.eos_ids,
            pad_id=None if "pad_token" in config.named else config.pad_id,
            chat_templates=config.chat_templates,
        )
        if config.add_bos_token is not None and config.add_bos_token != tokenizer.adds_bos:
            _logger.warning(
                "%s says add_bos_token=%s, but the post-processor of tokenizer.json %s a first token; "
                "tokenizer.json decides, as in transformers 5",
                path / "tokenizer_config.json",
                config.add_bos_token,
                "adds" if tokenizer.adds_bos else "does not add",
            )
        return tokenizer

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """Return the tokenizer of the ``tokenizers`` library, which must not be changed."""
        return self._backend

    @property
    def vocab_size(self) -> int:
        """Return the highest id plus one, added tokens included."""
        return self.token_bytes.size

    @cached_property
    def longest_token(self) -> int | None:
        """Bytes of text that one token stands for, at most; None if they may be any number."""
        return longest_token(self._backend)

    @property
    def adds_bos(self) -> bool:
        return bool(self._prefix)

    @property
    def chat_template(self) -> str | None:
        """Return the default chat template; None: there is none."""
        return self.chat_templates.get("default")

    def parsing_special(self) -> Tokenizer:
        """Return the same tokenizer with ``parse_special``."""
        other = copy.copy(self)
        other.parse_special = True
        return other

    def with_chat_template(self, template: str, *, ends: Sequence[int] = ()) -> Tokenizer:
        """Return the same tokenizer with this chat template only. ``ends`` are further ids that end
        a generation."""
        other = copy.copy(self)
        other.chat_templates = {"default": template}
        other.eos_ids = tuple(dict.fromkeys([*self.eos_ids, *ends]))
        return other

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of ``text``. Special tokens spelled in the text become their ids.

        With ``add_special_tokens`` the tokenizer's post-processor adds its own (BOS, for most
        models that have one). One long text at a time is tokenised, over all threads.
        ``InvalidArgument`` if ``text`` is no text, or holds half a surrogate pair, which UTF-8
        cannot express.
        """
        return encode_with(self._encoder, text, add_special_tokens=add_special_tokens)

    def encode_inside(self, *texts: str) -> list[int]:
        """Return the token ids of a text in the middle of another, which it continues character by
        character: no space is put before it, and no white space is stripped. Several texts are
        tokenised by themselves.

        What normalisers and the vocabulary cannot express changes as it does in a whole prompt.
        """
        return encode_with(self._inner, *texts)

    def encode_after(self, ids: Ids, text: str) -> list[int]:
        """Return the token ids of ``text`` behind the tokens ``ids``. If these have no text (BOS,
        say), a text begins."""
        return self.encode_inside(text) if self.has_text(ids) else self.encode(text, add_special_tokens=False)

    def encode_rendered(self, *parts: str, inside: bool = False) -> list[int]:
        """Return the token ids of a chat template's output with its special tokens, or of a part of
        it, in parts that are tokenised by themselves. ``inside``: there is text before it. A part
        continues the text before it up to its first added token; behind that all is as in a whole
        prompt."""
        pieces: list[tuple[bool, str]] = []
        for part in parts:
            start = len(part) if inside else 0
            if inside and self._inner is not self._encoder and (found := self._added.search(part)) is not None:
                start = found.start()
            pieces += [(True, part[:start]), (False, part[start:])]
            inside = True
        ids: list[int] = []
        for is_inner, group in groupby((piece for piece in pieces if piece[1]), key=itemgetter(0)):
            ids += encode_with(self._inner if is_inner else self._encoder, *(text for _, text in group))
        return ids

    def has_text(self, ids: Ids) -> bool:
        """Return whether any token of ``ids`` has a text. Special tokens and embeddings have
        none."""
        return bool(self.token_bytes.end_of(ids[ids >= 0], skip_special_tokens=True))

    @cached_property
    def _added(self) -> re.Pattern[str]:
        """Finds the added tokens that a text spells."""
        added = self._backend.get_added_tokens_decoder().values()
        return finder(tuple(token.content for token in added if token.content))

    @cached_property
    def control_tokens(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the tokens that messages are not to spell, and the special ones among them
        (``spelled_tokens``)."""
        added = self._backend.get_added_tokens_decoder().values()
        return control_tokens({token.content: token.special for token in added})

    @cached_property
    def _normalized(self) -> dict[int, str]:
        """The added tokens that are searched in normalised text."""
        added = self._backend.get_added_tokens_decoder() if self._backend.normalizer is not None else {}
        return {token_id: token.content for token_id, token in added.items() if token.normalized}

    def normalized_token(self, text: str, tokens: Collection[str], hidden: Collection[int]) -> int | None:
        """Return the place of a character, none of ``hidden``, of one of these ``tokens`` that the
        text spells once it is normalised; None: there is none, or tokens are found in the text as
        it is."""
        ids = {token_id for token_id, content in self._normalized.items() if content in tokens}
        if not ids:
            return None
        found = self._encoder.places(text)
        places = (range(*place) for one, place in zip(*found, strict=True) if one in ids)
        return next((at for place in places for at in place[1:] if ord(text[at]) not in hidden), None)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``; unknown ids (of a padded vocabulary) have none.

        It is what ``tokenizers`` gives, except where bytes are not valid UTF-8: the characters
        around them stay, and each maximal ill-formed part becomes one U+FFFD. ``InvalidArgument``
        for a negative id.
        """
        for token_id in ids:
            if token_id < 0:
                raise InvalidArgument(f"token ids must be at least 0, got {token_id}")
        if not self.token_bytes.concatenates:
            known = [token_id for token_id in ids if self.token_bytes.token(token_id) is not None]
            text = self._backend.decode(known, skip_special_tokens=skip_special_tokens)
            if REPLACEMENT not in text:
                return text
        return join_pieces(self.token_bytes, ids, skip_special_tokens=skip_special_tokens).decode(errors="replace")

    def spellings(self, words: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each word as it is given, without white space before it, and behind
        one space: the beginning of a word belongs to its first token in most vocabularies."""
        texts: dict[str, None] = {}
        for word in words:
            bare = word.lstrip()
            texts |= dict.fromkeys((word, bare, f" {bare}") if bare else (word,))
        return [ids for text in texts if (ids := self.encode_inside(text))]

    def token_text(self, token_id: int) -> str:
        """Return the text of one token inside a text, for log-probabilities: special tokens spelled
        out, leading space kept. Part of a character is U+FFFD; ``token_bytes.piece`` has the
        bytes."""
        return self.token_bytes.piece(token_id).decode(errors="replace")

    def token_id(self, token: str) -> int | None:
        """Return the id of a token as the vocabulary spells it, or None."""
        return self._backend.token_to_id(token)

    def check_fits(self, vocab_size: int) -> None:
        """Raise ``CheckpointError`` if text can become ids beyond a model's ``vocab_size``
        embeddings.

        A tokenizer smaller than the model is fine. So are special tokens beyond it that appear only
        if a text spells them (an image token beside a text-only model, a padding token): they are
        logged, and the engine refuses the id.
        """
        if self.vocab_size <= vocab_size:
            return
        beyond = {
            token: id for token, id in self._backend.get_vocab(with_added_tokens=True).items() if id >= vocab_size
        }
        added = self._encoder.encode([""], add_special_tokens=True)[0]
        produced = {token: id for token, id in beyond.items() if id not in self.token_bytes.special_ids or id in added}
        if produced:
            token, token_id = max(produced.items(), key=lambda item: item[1])
            raise CheckpointError(
                f"the tokenizer has ids up to {token_id} ({token!r}), but the model has only {vocab_size} embeddings "
                f"(ids up to {vocab_size - 1}); they do not belong together"
            )
        _logger.warning(
            "special tokens beyond the model's %d embeddings cannot be used: %s", vocab_size, sorted(beyond)
        )

    def _named_id(self, name: str, given: int | None) -> int | None:
        if given is not None or name not in self.special_tokens:
            return given
        return self._backend.token_to_id(self.special_tokens[name])

    def _special_prefix(self) -> list[int]:
        """Return the ids that the post-processor puts before a text."""
        plain, special = (self._encoder.encode(["a"], add_special_tokens=added)[0] for added in (False, True))
        starts = (start for start in range(len(special)) if plain and special[start : start + len(plain)] == plain)
        return special[: next(starts, len(special))]


def encode_with(encoder: TextEncoder, *texts: str, add_special_tokens: bool = False) -> list[int]:
    """Tokenise with ``encoder``, one long text at a time."""
    with long_texts.turn(sum(len(require_text("text", text)) for text in texts)):
        found = encoder.encode(texts, add_special_tokens=add_special_tokens)
    return [token for one in found for token in one]


@dataclass(frozen=True, kw_only=True, slots=True)
class _TokenizerFiles:
    """What the files beside tokenizer.json say, validated."""

    path: Path
    named: Mapping[str, str]
    listed: Sequence[str]
    declared: Mapping[int, tokenizers.AddedToken]
    """``added_tokens_decoder`` of tokenizer_config.json."""
    add_bos_token: bool | None
    bos_id: int | None
    eos_ids: Sequence[int]
    pad_id: int | None
    chat_templates: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> _TokenizerFiles:
        config_file = path / "tokenizer_config.json"
        config = read_json(config_file)
        tokens_file = path / "special_tokens_map.json"
        tokens = read_json(tokens_file)
        declared = _read_declared(config, config_file)
        # As in transformers 5: a configuration that declares its added tokens is complete without
        # the older map.
        named = _read_named(config, config_file), _read_named(tokens, tokens_file)
        listed = _read_listed(config, config_file), _read_listed(tokens, tokens_file)
        model, generation = read_json(path / "config.json"), read_json(path / "generation_config.json")
        model = {**_as_mapping(model.get("text_config")), **model}
        ids = {
            key: _read_ids(generation, key, path / "generation_config.json")
            or _read_ids(model, key, path / "config.json")
            for key in ("bos_token_id", "eos_token_id", "pad_token_id")
        }
        add_bos = config.get("add_bos_token")
        return cls(
            path=path,
            named={**named[1], **named[0]} if declared else {**named[0], **named[1]},
            listed=[*listed[0], *listed[1]],
            declared=declared,
            add_bos_token=add_bos if isinstance(add_bos, bool) else None,
            bos_id=next(iter(ids["bos_token_id"]), None),
            eos_ids=ids["eos_token_id"],
            pad_id=next(iter(ids["pad_token_id"]), None),
            chat_templates=_read_chat_templates(path, config, config_file),
        )


def _way(path: Path) -> str:
    """Return the advice of an error: how to make a ``tokenizer.json`` for a checkpoint."""
    own = _as_mapping(read_json(path / "tokenizer_config.json").get("auto_map")).get("AutoTokenizer")
    if own is None:
        return (
            f"make one with transformers: AutoTokenizer.from_pretrained({str(path)!r}).save_pretrained({str(path)!r})"
        )
    name = next((one for one in (own if isinstance(own, list) else [own]) if one is not None), own)
    return (
        f"code of the checkpoint reads the vocabulary ({name}), which is not run: give tokenizer=DIRECTORY with a "
        "tokenizer.json of the same vocabulary, or the model as a GGUF file, which holds its tokenizer"
    )


def _as_mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _token_content(value: object, key: str, file: Path) -> str:
    """Return the text of a token given as text or as ``{"content": text, ...}``."""
    content = value.get("content") if isinstance(value, Mapping) else value
    if not isinstance(content, str):
        raise CheckpointError(f"{file}: {key} must be a string or an object with 'content', found {value!r}")
    return content


def _read_named(config: Mapping[str, Any], file: Path) -> dict[str, str]:
    """Read special tokens by name; a model's own (``image_token``) count if they are plain
    strings."""
    named = {key: _token_content(config[key], key, file) for key in _NAMED_TOKENS if config.get(key) is not None}
    own = {key: value for key, value in config.items() if key.endswith("_token") and isinstance(value, str)}
    extra = _as_mapping(config.get("extra_special_tokens"))
    return named | own | {key: _token_content(value, key, file) for key, value in extra.items() if key not in own}


def _read_listed(config: Mapping[str, Any], file: Path) -> list[str]:
    """Special tokens without a name."""
    listed = []
    for key in _LISTED_TOKENS:
        values = config.get(key) or ()
        if isinstance(values, Mapping):
            continue  # named, see above
        if not isinstance(values, Sequence) or isinstance(values, str):
            raise CheckpointError(f"{file}: {key} must be a list of tokens, found {values!r}")
        listed += [_token_content(value, f"{key}[{i}]", file) for i, value in enumerate(values)]
    return listed


def _read_declared(config: Mapping[str, Any], file: Path) -> dict[int, tokenizers.AddedToken]:
    declared = {}
    for key, value in _as_mapping(config.get("added_tokens_decoder")).items():
        content = _token_content(value, f"added_tokens_decoder[{key!r}]", file)
        flags = _as_mapping(value)
        if not key.isdecimal():
            raise CheckpointError(f"{file}: the keys of added_tokens_decoder must be token ids, found {key!r}")
        names = ("single_word", "lstrip", "rstrip", "normalized", "special")
        declared[int(key)] = tokenizers.AddedToken(content, **{name: bool(flags.get(name)) for name in names})
    return declared


def _read_ids(config: Mapping[str, Any], key: str, file: Path) -> list[int]:
    """Read an id, a list, or null. A negative id is "none", as in the original LLaMA
    checkpoints."""
    value = config.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(not isinstance(id, int) or isinstance(id, bool) for id in ids):
        raise CheckpointError(f"{file}: {key} must be a token id or a list of them, found {value!r}")
    return [id for id in ids if id >= 0]


def _read_chat_templates(path: Path, config: Mapping[str, Any], config_file: Path) -> dict[str, str]:
    """Read templates by name: from files of their own, tokenizer_config.json,
    chat_template.json."""
    files = {file.stem: file for file in sorted(path.glob("additional_chat_templates/*.jinja"))}
    if (path / "chat_template.jinja").is_file():
        files["default"] = path / "chat_template.jinja"
    if files:
        try:
            return {name: file.read_text(encoding="utf-8") for name, file in files.items()}
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"a chat template of {path} cannot be read: {error}") from error
    file, template = config_file, config.get("chat_template")
    if template is None:
        file = path / "chat_template.json"
        template = read_json(file).get("chat_template")
    if template is None:
        return {}
    if isinstance(template, str):
        return {"default": template}
    entries = template if isinstance(template, list) else [None]
    named = {entry["name"]: entry["template"] for entry in map(_as_mapping, entries) if _is_named_template(entry)}
    if len(named) != len(entries):
        raise CheckpointError(
            f"{file}: chat_template must be a string or a list of objects with different 'name' and 'template', "
            f"found {type(template).__name__} {template!r:.80}"
        )
    return named


def _is_named_template(entry: Mapping[str, Any]) -> bool:
    return all(isinstance(entry.get(key), str) for key in ("name", "template"))


def _add_missing_tokens(backend: tokenizers.Tokenizer, config: _TokenizerFiles) -> None:
    """Add the tokens that only tokenizer_config.json declares, at the ids that it declares."""
    for token_id, token in sorted(config.declared.items()):
        if backend.token_to_id(token.content) is not None:
            continue
        backend.add_tokens([token])
        if (found := backend.token_to_id(token.content)) != token_id:
            raise CheckpointError(
                f"{config.path / 'tokenizer_config.json'} declares token {token.content!r} with id {token_id}, "
                f"but tokenizer.json lacks it and its next free id is {found}"
            )


def _mark_special(backend: tokenizers.Tokenizer, config: _TokenizerFiles) -> None:
    """Make named and listed tokens special that tokenizer.json has as ordinary ones. transformers
    would also add those that are missing, for which a model has no embedding."""
    added = backend.get_added_tokens_decoder()
    for content in dict.fromkeys([*config.named.values(), *config.listed]):
        token_id = backend.token_to_id(content)
        if token_id is None:
            _logger.warning("%s names the special token %r, which tokenizer.json lacks", config.path, content)
        elif token_id not in added:
            backend.add_special_tokens([tokenizers.AddedToken(content, special=True, normalized=False)])
