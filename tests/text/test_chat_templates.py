"""The chat template that a user chooses, the built-in ones, and that of the bundled model."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.server.conftest import OPTIONS

from quire import LLM, AsyncLLM, InvalidArgument, NotFound, SamplingParams
from quire.base.config import CHAT_TEMPLATES, EngineConfig
from quire.models.catalogue import bundled_models
from quire.server.tools.tools import parser_for
from quire.text.chat_rendering import render_chat
from quire.text.chat_templates import built_in_template, with_chosen_template
from quire.text.tokenizer import Tokenizer
from small_tokenizers import byte_level

BUNDLED = bundled_models()["tiny-python"]
USER = {"role": "user", "content": "def fib(n):"}
ANSWER = {"role": "assistant", "content": "\n    return n"}
SYSTEM = {"role": "system", "content": "Be brief.\nBe right."}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "<é>"}'}}],
}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "4"}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
TOOL_LINE = '{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}'
GREEDY = SamplingParams(temperature=0, max_tokens=4)


def own_template() -> str:
    return (BUNDLED / "chat_template.jinja").read_text(encoding="utf-8")


def test_the_bundled_template_continues_code_and_comments_on_everything_else() -> None:
    def rendered(*messages: dict[str, Any], **more: Any) -> str:
        return render_chat(own_template(), messages, **more)

    assert rendered(USER) == "def fib(n):"
    assert rendered(USER, ANSWER, USER) == "def fib(n):\n    return n\ndef fib(n):"
    assert rendered(USER, USER) == "def fib(n):\ndef fib(n):"
    assert rendered(SYSTEM, USER) == "# Be brief.\n# Be right.\ndef fib(n):"
    assert rendered(USER, ANSWER) == "def fib(n):\n    return n"
    call = '# {"name": "f", "arguments": {"x": "<é>"}}\n'
    assert rendered(USER, CALL, RESULT, tools=TOOLS) == f"# {TOOL_LINE}\ndef fib(n):\n{call}# 4\n"
    assert rendered({"role": "user", "content": "x\n"}, ANSWER, RESULT) == "x\n\n    return n\n# 4\n"
    assert parser_for({}, own_template()) is None


@pytest.mark.parametrize("name", [*CHAT_TEMPLATES, "tiny-python"])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no_tools", "with_tools"])
def test_templates_render_what_transformers_renders(name: str, tools: list[Any] | None) -> None:
    import transformers

    oracle = transformers.AutoTokenizer.from_pretrained(str(BUNDLED))
    source = own_template() if name == "tiny-python" else built_in_template(name)
    called = {**CALL, "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": "<é>"}}}]}
    with_calls = [USER, called, RESULT, RESULT, USER]
    for messages in ([USER], [SYSTEM, USER, ANSWER, USER], with_calls, [USER, ANSWER]):
        for prompt in (True, False):

            def render(messages: list[Any] = messages, prompt: bool = prompt) -> str:
                return render_chat(source, messages, tools=tools, add_generation_prompt=prompt)

            if name == "plain" and (tools or messages is with_calls):
                with pytest.raises(InvalidArgument, match="'plain' has no place for tool"):
                    render()
                continue
            assert render() == oracle.apply_chat_template(
                messages,
                tools,
                # Of the bundled model the file beside it, as transformers finds it by itself.
                chat_template=None if name == "tiny-python" else source,
                add_generation_prompt=prompt,
                tokenize=False,
            )


def test_plain_text_is_as_it_is() -> None:
    assert render_chat(built_in_template("plain"), [SYSTEM, USER, ANSWER]) == (
        "Be brief.\nBe right.\ndef fib(n):\n\n    return n\n"
    )


def test_chatml_is_chatml_with_the_tools_of_hermes() -> None:
    source = built_in_template("chatml")
    assert render_chat(source, [SYSTEM, USER]) == (
        "<|im_start|>system\nBe brief.\nBe right.<|im_end|>\n<|im_start|>user\ndef fib(n):<|im_end|>\n<|im_start|>assistant\n"
    )
    text = render_chat(source, [SYSTEM, USER, CALL, RESULT, RESULT], tools=TOOLS, add_generation_prompt=False)
    assert text.startswith("<|im_start|>system\nBe brief.\nBe right.\n\n# Tools\n")
    assert f"<tools>\n{TOOL_LINE}\n</tools>" in text
    assert text.endswith(
        '<|im_start|>assistant\n<tool_call>\n{"name": "f", "arguments": {"x": "<é>"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n4\n</tool_response>\n<tool_response>\n4\n</tool_response><|im_end|>\n"
    )
    read = parser_for({}, source)
    assert read is not None
    assert read.name == "hermes"


def test_every_built_in_template_is_there_and_in_the_help() -> None:
    folder = BUNDLED.parent / "chat_templates"
    assert sorted(file.stem for file in folder.iterdir()) == sorted(CHAT_TEMPLATES)
    (help_text,) = [
        field.metadata["help"] for field in EngineConfig.__dataclass_fields__.values() if field.name == "chat_template"
    ]
    assert all(name in help_text for name in CHAT_TEMPLATES)


def test_a_built_in_template_ends_answers_where_the_model_has_its_token(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = Tokenizer(byte_level(), chat_templates={"default": "x", "tool_use": "y"})
    chosen = with_chosen_template(tokenizer, "chatml")
    assert chosen.eos_ids == (*tokenizer.eos_ids, tokenizer.token_id("<|im_end|>"))
    assert chosen.chat_templates == {"default": built_in_template("chatml")}
    assert tokenizer.chat_templates == {"default": "x", "tool_use": "y"}
    assert not caplog.records
    bundled = Tokenizer.from_directory(BUNDLED)
    assert bundled is not None
    assert with_chosen_template(bundled, "chatml").eos_ids == bundled.eos_ids
    assert "'<|im_end|>', which this model does not have" in caplog.text


def test_names_of_the_models_own_templates_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("rag", "chatml", "other.jinja"):
        (tmp_path / name).write_text("a file: {{ messages }}")
    own = Tokenizer(byte_level(), chat_templates={"rag": "r", "chatml": "own"})
    assert with_chosen_template(own, "rag").chat_template == "r"
    assert with_chosen_template(own, "chatml").chat_template == "own"
    assert with_chosen_template(own, "./chatml").chat_template == "a file: {{ messages }}"
    assert with_chosen_template(own, "{{ messages }}").chat_template == "{{ messages }}"


def test_what_is_no_template_is_refused_in_a_sentence_before_the_weights_are_read(tmp_path: Path) -> None:
    files = {"bad.jinja": b"\n{% for %}", "notes.md": b"# Notes", "weights": b"\xff\xfe\x00"}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    for given, kind, says in (
        ("chatlm", NotFound, r"'chatlm': there is no such file; .* \('chatml', 'plain'\)"),
        (tmp_path / "bad.jinja", InvalidArgument, r"bad\.jinja' is not valid Jinja: line 2"),
        (tmp_path / "notes.md", InvalidArgument, r"notes\.md' never reads 'messages'"),
        (tmp_path / "weights", InvalidArgument, r"weights' is no text in UTF-8"),
        (tmp_path, InvalidArgument, "cannot be read: Is a directory"),
        ("{{ message }}", InvalidArgument, "chat_template never reads 'messages'"),
        ("{% for %}", InvalidArgument, "chat_template is not valid Jinja: line 1"),
        ("a\0b", InvalidArgument, "cannot be read"),
        ("x" * 5000, InvalidArgument, "cannot be read: File name too long"),
        ("", InvalidArgument, "chat_template must be a non-empty string"),
        (3, InvalidArgument, "chat_template must be a non-empty string"),
    ):
        with pytest.raises(kind, match=says):
            LLM("tiny-python", chat_template=given)  # type: ignore[arg-type]


def test_a_model_without_a_tokenizer_refuses_one(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(BUNDLED / name)
    with pytest.raises(InvalidArgument, match="this model has no tokenizer, so it cannot chat"):
        LLM(tmp_path, chat_template="chatml")


def test_the_chosen_template_counts_in_every_chat(tmp_path: Path) -> None:
    """Of ``LLM``, ``AsyncLLM`` and sessions, also where tools are given."""
    file = tmp_path / "mine.jinja"
    file.write_text("{% for message in messages %}# {{ message.content }}\n{% endfor %}")
    with LLM("tiny-python", chat_template=file, **OPTIONS) as llm:
        assert llm.tokenizer is not None
        wanted = llm.tokenizer.encode("# def fib(n):\n")
        assert llm.chat([USER], GREEDY)[0].prompt_token_ids == wanted
        assert llm.chat([USER], GREEDY, tools=TOOLS)[0].prompt_token_ids == wanted
        assert llm.session().chat([USER], GREEDY).prompt_token_ids == wanted

    async def prompt() -> list[int]:
        async with await asyncio.to_thread(AsyncLLM, "tiny-python", chat_template=str(file), **OPTIONS) as llm:
            return (await llm.chat([USER], GREEDY))[0].prompt_token_ids

    assert asyncio.run(prompt()) == wanted
