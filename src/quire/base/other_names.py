"""Options, commands and paths of llama.cpp, Ollama and vLLM, and what they are here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from quire.base.errors import InvalidArgument


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherOption:
    """Another program's option: one of Quire's under another name (``own``), one for what Quire
    does by itself (``fine``), or one that is refused with an advice (``says``)."""

    own: str = ""
    """The option that means the same; without dashes, an environment variable."""
    form: str = "{}"
    """What ``own`` gets, of the value."""
    separator: str | None = None
    """What is between several values in one word, each of which becomes one of ``own``."""
    values: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Words of ``own`` for values, in place of ``form``; "": none, the default."""
    fine: tuple[str, ...] | None = None
    """Values of what Quire does by itself; empty: all."""
    default: str = ""
    """The field of generation_config.json for which a server takes the value, where there is no
    ``own``."""
    takes: bool = True
    """Whether a value follows."""
    says: str = ""
    """What is so in any case, or what to use."""

    def words(self, name: str, value: str | None, known: Mapping[str, bool]) -> list[str] | None:
        """Return the words to read in place of ``name`` and its value, where a command has the
        options ``known``; None if it needs none. Raise ``InvalidArgument`` for what cannot be
        had."""
        if value is not None and (found := self.values.get(value)) is not None:
            return found.split()
        if self.own in known:
            parts = [] if value is None else value.split(self.separator) if self.separator else [value]
            return [word for part in parts for word in (self.own, self.form.format(part))] or [self.own]
        if self.default and value is not None and _DEFAULTS in known:
            return [_DEFAULTS, f'{{"{self.default}": {value}}}']
        if self.fine is not None and (not self.fine or (value or "") in self.fine):
            return None
        problem = f"there is no option {name} here"
        if self.fine is not None:
            problem = f"{name} {value or ''} is not supported"
        raise InvalidArgument(f"{problem}; {self.says or f'another command has {self.own}'}")


def _same(own: str, *names: str, **more: object) -> dict[str, OtherOption]:
    return dict.fromkeys(names, OtherOption(own=own, **more))  # type: ignore[arg-type]


def _itself(says: str, *names: str, fine: tuple[str, ...] = (), takes: bool = False) -> dict[str, OtherOption]:
    return dict.fromkeys(names, OtherOption(says=says, fine=fine, takes=takes or bool(fine)))


def _refused(says: str, *names: str) -> dict[str, OtherOption]:
    return dict.fromkeys(names, OtherOption(says=says))


_DEFAULTS = "--override-generation-config"
_GPU = "--device auto takes a GPU for the whole model if there is one; layers are not divided"
_PARTS = "--kv-dtype gives the type of K and V"
_READS = "the chat template tells how answers are read; --tool-call-parser names the form of calls if it does not"
_THINKS = "the chat template decides, and requests give reasoning_effort or chat_template_kwargs"
_WINDOW = "a session with a window never fills; other requests end at the end of the context"

OPTIONS: Mapping[str, OtherOption] = {
    # The same under another name.
    **_same("--max-model-len", "-c", "--ctx-size", "--num-ctx", "--context-length", "--max-seq-len", values={"0": ""}),
    **_same("--max-num-seqs", "-np", "--parallel", values={"-1": ""}),
    **_same("--max-num-batched-tokens", "-b", "--batch-size"),
    **_same("--kv-dtype", "--kv-cache-dtype"),
    **_same("--page-size", "--block-size"),
    **_same("--tensor-parallel-size", "-tp"),
    **_same("--pipeline-parallel-size", "-pp"),
    **_same("--quantization", "-q"),
    **_same("--host-memory", "--swap-space", form="{}GiB"),
    **_same("--host-memory", "-cram", "--cache-ram", form="{}MiB", values={"0": "--host-memory 0", "-1": ""}),
    **_same("--state-dir", "--slot-save-path"),
    **_same("--served-model-name", "-a", "--alias", separator=","),
    **_same("--model", "-hf", "-hfr", "--hf-repo"),
    **_same("--chat-template", "--chat-template-file"),
    **_same("--speculative", "-md", "--model-draft", "--spec-draft-model", form="draft:{}"),
    **_same("--adapters", "--lora-modules"),
    **_same("--no-enable-prefix-caching", "--no-cache-prompt", takes=False),
    **_same(
        "--max-tokens", "-n", "--predict", "--n-predict", "--num-predict", values={"-1": ""}, default="max_new_tokens"
    ),
    **_same("--temperature", "--temp", default="temperature"),
    **_same("--repetition-penalty", "--repeat-penalty", default="repetition_penalty"),
    **{
        f"--{one.replace('_', '-')}": OtherOption(default=one, says=f"requests give {one}")
        for one in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    },
    "--max-tokens": OtherOption(default="max_new_tokens", says="requests give max_tokens"),
    **_same("--seed", "-s", values={"-1": ""}),
    **_same("--system", "-sys", "--system-prompt"),
    **_same("OMP_NUM_THREADS", "-t", "--threads", values={"-1": ""}),
    # What is so in any case.
    **_itself("prefixes are always cached", "--cache-prompt"),
    **_itself("long prompts always run in chunks", "--enable-chunked-prefill"),
    **_itself("requests always share steps", "-cb", "--cont-batching"),
    **_itself("a step takes what fits into its batch", "-ub", "--ubatch-size", takes=True),
    **_itself("the model's chat template is always used", "--jinja"),
    **_itself(_READS, "--enable-auto-tool-choice"),
    **_itself(_READS, "--reasoning-parser", takes=True),
    **_itself("reasoning is in reasoning_content", "--reasoning-format", fine=("auto", "deepseek")),
    **_itself(_THINKS, "-rea", "--reasoning", fine=("auto",)),
    **_itself(_THINKS, "--reasoning-budget", fine=("-1",)),
    **_itself("the memory of all sequences is one pool", "-kvu", "--kv-unified"),
    **_itself(
        "the fastest kernels are taken; --attention-backend names others",
        "-fa",
        "--flash-attn",
        fine=("", "on", "auto", "1"),
    ),
    **_itself("files of weights are mapped into memory", "--mmap"),
    **_itself("the model stays loaded until the command ends", "--keepalive", takes=True),
    **_itself("a full context ends a text", "--no-context-shift"),
    **_itself("GET /metrics and GET /slots are always there", "--metrics", "--slots"),
    **_itself("the page at / is always there", "--webui", "--ui"),
    **_itself("the log has no texts of requests", "--disable-log-requests", "--no-enable-log-requests"),
    **_itself("adapters are loaded with --adapters, or over HTTP from an --adapter-dir", "--enable-lora"),
    **_itself("models generate text", "--task", "--runner", fine=("generate", "auto")),
    **_itself("the kind of file is found by itself", "--load-format", fine=("auto", "safetensors")),
    **_itself("there is one copy of the model", "-dp", "--data-parallel-size", fine=("1",)),
    "-ngl": (
        _LAYERS := OtherOption(
            fine=("auto", "all", "-1", *map(str, range(99, 1000))), values={"0": "--device cpu"}, says=_GPU
        )
    ),
    "--gpu-layers": _LAYERS,
    "--n-gpu-layers": _LAYERS,
    # What is not here.
    **_refused(_PARTS, "-ctk", "-ctv", "--cache-type-k", "--cache-type-v"),
    **_refused("--adapters NAME=PATH loads adapters", "--lora", "--lora-scaled"),
    **_refused("--adapter-ranks bounds what a step uses", "--max-loras", "--max-lora-rank"),
    **_refused("the prompt is an argument, as in quire generate MODEL PROMPT", "-p", "--prompt"),
    **_refused("- as the prompt reads stdin, as in quire generate MODEL - < FILE", "-f", "--file"),
    **_refused("quire chat MODEL is a conversation", "-cnv", "--conversation", "-i", "--interactive"),
    **_refused("it stands before the command, as in quire -v chat MODEL", "-v", "--verbose"),
    **_refused("--allowed-origin takes one origin, and may be repeated", "--allowed-origins", "--cors-origins"),
    **_refused("--api-key, the variable QUIRE_API_KEY or a file for --config gives keys", "--api-key-file"),
    **_refused("weights stay on the device; --quantization makes them smaller", "--cpu-offload-gb"),
    **_refused("--speculative METHOD gives how drafts are made", "--speculative-config", "--spec-type"),
    **_refused(
        "--tensor-parallel-size divides layers, the variable CUDA_VISIBLE_DEVICES chooses devices",
        "-ts",
        "--tensor-split",
        "-sm",
        "--split-mode",
        "-mg",
        "--main-gpu",
    ),
    **_refused(_WINDOW, "--context-shift"),
    **_refused("only text is taken", "-mm", "--mmproj", "--limit-mm-per-prompt"),
    **_refused("no model that runs here has embeddings", "--embedding", "--embeddings", "--rerank", "--reranking"),
    **_refused("the variable HF_HUB_OFFLINE=1 keeps it from the Hub", "--offline"),
    **_refused("the variable HF_HOME gives the directory", "--download-dir"),
    **_refused(
        "a proxy in front of the server speaks TLS",
        "--ssl-keyfile",
        "--ssl-certfile",
        "--ssl-key-file",
        "--ssl-cert-file",
    ),
}
"""Options of ``vllm serve``, ``llama-server`` and others."""

SEVERAL = frozenset({"--served-model-name", "--lora-modules"})
"""Options behind which vLLM takes several values, once the model is given."""


def translated(words: list[str], known: Mapping[str, bool]) -> tuple[list[str], dict[str, str], dict[str, str]]:
    """Return the words of a command line with Quire's options in place of others', the sentences
    about options that were not needed, and the environment variables that were given. ``known``:
    the command's own options, and whether a value follows. Raise ``InvalidArgument`` for what
    cannot be had."""
    rest, found = list(words), list[str]()
    notes, variables = dict[str, str](), dict[str, str]()
    placed = False
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if word == "--":
            return [*found, word, *rest], notes, variables
        if not word.startswith("-") or word == "-":
            placed = True
            found.append(word)
            continue
        other = None if name in known else OPTIONS.get(name)
        own = name if other is None else other.own
        if other is None:
            found.append(word)
            placed |= name in ("--model", "-m")
            if known.get(name) and not equals and rest:
                found.append(rest.pop(0))
        else:
            optional = "" in (other.fine or ())
            follows = other.takes and bool(rest) and not (optional and rest[0] not in ("on", "off", "auto", "0", "1"))
            given = value if equals else rest.pop(0) if follows else None
            if own == own.upper() and own and given is not None and given not in other.values:
                if not given.isdecimal() or int(given) < 1:
                    raise InvalidArgument(f"{name} {given[:20]!r}: a number of 1 or more is accepted")
                variables[own] = given
            elif (made := other.words(name, given, known)) is None:
                notes[name] = other.says
            else:
                placed |= own == "--model"
                found += made
        while name in SEVERAL and placed and rest and not rest[0].startswith("-"):
            found += [own, rest.pop(0)]
    return found, notes, variables


ALIASES: Mapping[str, str] = {"run": "chat"}
"""Commands of other programs that mean the same here."""

COMMANDS: Mapping[str, str] = {
    "pull": "quire serve MODEL and quire chat MODEL fetch a Hugging Face id when they first load it",
    "list": "quire models lists the models on this machine and what runs",
    "ls": "quire models lists the models on this machine and what runs",
    "help": "quire, without a command, lists them",
    "rm": "models are files; quire models says where they are",
    "create": "--chat-template, --system and the options of sampling stand in place of a Modelfile",
    "convert": "a directory of safetensors and a GGUF file are read as they are",
    "ps": "quire top shows a running server",
    "show": "quire capabilities MODEL describes a model",
    "stop": "Ctrl-C, or the signal SIGTERM, stops a server",
    "complete": "quire generate MODEL PROMPT continues a text",
}

_TEXT = "POST /v1/completions continues a text, POST /completion in llama.cpp's form"
_NO_VECTORS = "no model that runs here has embeddings"

PATHS: Mapping[str, str] = {
    **dict.fromkeys(("/generate", "/generate_stream"), _TEXT),
    **dict.fromkeys(("/embedding", "/embeddings"), _NO_VECTORS),
    **dict.fromkeys(
        ("/api/pull", "/api/create"), "the server has the model that it was started with (quire serve MODEL)"
    ),
    **dict.fromkeys(
        ("/chat/completions/input_tokens", "/v1/chat/completions/input_tokens"),
        "POST /tokenize counts the tokens of messages",
    ),
    "/lora-adapters": "POST /v1/load_lora_adapter loads an adapter",
    "/responses": "POST /v1/responses answers items",
    "/messages": "POST /v1/messages answers blocks",
    "/ping": "GET /health tells whether the server runs",
}

_GENERATES = "POST /v1/chat/completions, /v1/completions, /v1/responses and /v1/messages generate text"

NOT_OFFERED: Mapping[str, str] = {
    **dict.fromkeys(
        ("/rerank", "/v1/rerank", "/v2/rerank", "/reranking", "/v1/reranking"), "texts are not ranked by this server"
    ),
    **dict.fromkeys(("/score", "/v1/score", "/classify", "/pooling"), "texts are neither compared nor classified here"),
    "/v1/audio/speech": "no model that runs here speaks",
    "/v1/audio": "no model that runs here hears speech",
    "/v1/images": "no model that runs here makes pictures",
    "/v1/videos": "no model that runs here makes films",
    "/v1/realtime": "no model that runs here hears or speaks",
    "/v1/moderations": "no model that runs here judges texts",
    "/v1/files": "the server keeps no files, but for states of sessions (GET /v1/sessions/{session_id}/state)",
    "/v1/uploads": "the server keeps no files, but for states of sessions (POST /v1/sessions/state)",
    "/v1/batches": "there are no batches of files; requests that are under way together run in one batch",
    "/v1/fine_tuning": "nothing is trained here; POST /v1/load_lora_adapter loads an adapter",
    "/v1/vector_stores": "documents are not searched here; a request brings them",
    **dict.fromkeys(
        ("/v1/assistants", "/v1/threads", "/v1/conversations"),
        "conversations are sessions (/v1/sessions) or responses (previous_response_id)",
    ),
}
"""Why calls of other servers, and all below them, are not here."""


def path_hint(path: str) -> str:
    """Return a hint for an unknown path: its replacement, or the reason why there is none."""
    if path in PATHS:
        return PATHS[path]
    for beginning, reason in NOT_OFFERED.items():
        if f"{path}/".startswith(f"{beginning}/"):
            return f"{reason}; {_GENERATES}, and the document /openapi.json lists all calls"
    return "the document /openapi.json lists what there is"
