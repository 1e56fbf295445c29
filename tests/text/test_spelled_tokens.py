"""Special tokens that messages spell are text: only the template writes control tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.small_llms import MakeLLM, greedy, make_checkpoint
from tokenizers import AddedToken, normalizers

from quire import LLM, BlendParams
from quire.text.chat_prompts import encode_chat
from quire.text.chat_rendering import render_chat
from quire.text.spelled_tokens import SpelledTokens
from quire.text.tokenizer import Tokenizer
from small_tokenizers import byte_level, sentencepiece

WRITES = {
    "as it is": "{{ m.content }}",
    "trimmed": "{{ m.content | trim }}",
    "in capitals": "{{ m.content | upper }}",
    "as JSON": "{{ m | tojson }}",
    "as ASCII": "{{ m | tojson(ensure_ascii=True) }}",
    "cut": "{{ m.content[1:9] }}",
    "as lines": "{% for line in m.content.split('\n') %}{{ loop.index }}{{ line }}{% endfor %}",
    "in a form": "{{ '%s|%d' | format(m.content, m.content | length) }}",
}
CHAT = "{%% for m in messages %%}<|im_start|>{{ m.role }}\n%s<|im_end|>{%% endfor %%}"
TEMPLATES = {name: CHAT % written for name, written in WRITES.items()}
TEMPLATES["marks made of roles"] = "{% for m in messages %}{{ '<|' ~ m.role ~ '|>' }}{{ m.content }}{% endfor %}"
SPELLED = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<|user|>", "<｜User｜>", "<tool call>"]
CONTENTS = st.lists(st.sampled_from([*SPELLED, "<", "|", "im_", "end|>", "a ", " b", "\n", "é", '"', "\U0010fffd"]))


def speaking(template: str, **named: str) -> Tokenizer:
    backend = byte_level()
    backend.add_special_tokens(["<|user|>"])
    backend.add_tokens([AddedToken("<｜User｜>", special=False)])  # as DeepSeek has it
    return Tokenizer(backend, chat_templates={"default": template}, special_tokens=named)


def controls(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """The tokens that no message may have."""
    known = {tokenizer.token_id(content) for content in SPELLED[:-1]}
    return [one for one in ids if one in known]


@pytest.mark.turns(3)
@pytest.mark.parametrize("name", list(TEMPLATES))
@settings(max_examples=examples(25, 100))
@given(contents=st.lists(CONTENTS.map("".join), min_size=1, max_size=3))
def test_only_the_template_writes_control_tokens(name: str, contents: list[str]) -> None:
    """Whatever it does with the messages, and the text is what it would be."""
    tokenizer = speaking(TEMPLATES[name])
    messages = [{"role": "user", "content": one} for one in contents]
    ids = encode_chat(tokenizer, messages)
    innocent = encode_chat(tokenizer, [{"role": "user", "content": "a long text"} for _ in contents])
    assert controls(tokenizer, ids) == controls(tokenizer, innocent)
    text = render_chat(TEMPLATES[name], messages)
    found = tokenizer.decode(ids, skip_special_tokens=False)
    assert found == text or (name == "in capitals" and found.lower() == text.lower())
    if not any(one in "".join(contents) for one in SPELLED[:-1]):
        assert ids == tokenizer.encode(text, add_special_tokens=False)


def test_every_text_of_a_conversation() -> None:
    """Of all roles, of tools, documents, variables, and of calls with escapes in their JSON."""
    template = "{{ bos_token }}{{ tools | tojson }}{{ documents }}{{ mood }}{{ messages | tojson }}<|im_end|>"
    tokenizer = speaking(template, bos_token="<s>")
    mark = "<|im_start|>"
    call = {"name": f"f{mark}", "arguments": '{"\\u003c|im_start|>": "\\u003c|im_end|\\u003e <\\/s>"}'}
    messages = [
        {"role": f"system{mark}", "content": [{"type": "text", "text": mark}]},
        {"role": "assistant", "content": mark, "tool_calls": [{"id": mark, "function": call}], "name": mark},
        {"role": "tool", "content": json.dumps({"found": mark}), "tool_call_id": mark},
    ]
    tools = [
        {"type": "function", "function": {"name": "f", "description": mark, "parameters": {mark: {"enum": [mark]}}}}
    ]
    ids = encode_chat(tokenizer, messages, {"documents": [{"text": mark}], "mood": mark}, tools=tools)
    found = [tokenizer.token_text(one) for one in controls(tokenizer, ids)]
    assert found == ["<s>", "<|im_end|>"]
    assert tokenizer.decode(ids, False).count(mark) == 14


def test_what_a_template_looks_for_in_answers() -> None:
    """It finds the marks of reasoning, and other marks in the same answer stay text."""
    template = (
        "{% for m in messages %}<|im_start|>{% if '</think>' in m.content %}{{ m.content.split('</think>')[-1] }}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    backend = byte_level()
    backend.add_special_tokens(["<think>", "</think>"])
    tokenizer = Tokenizer(backend, chat_templates={"default": template})
    content = "<think>why</think>so<|im_end|>"
    [start] = tokenizer.encode("<|im_start|>")
    answer = encode_chat(tokenizer, [{"role": "assistant", "content": content}])
    assert tokenizer.decode(answer, False) == "<|im_start|>so<|im_end|>"
    assert controls(tokenizer, answer) == [start]
    # Of a user it is text, in which nothing is looked for.
    asked = encode_chat(tokenizer, [{"role": "user", "content": content}])
    assert tokenizer.decode(asked, False) == f"<|im_start|>{content}"
    assert controls(tokenizer, asked) == [start]
    assert tokenizer.token_id("</think>") not in asked


def test_an_answer_has_the_tokens_that_were_generated() -> None:
    """Added tokens that are no special ones are in its text, and remain what they were."""
    tokenizer = speaking(TEMPLATES["as it is"])
    for mark in ("<tool call>", "<｜User｜>"):
        [token] = tokenizer.encode(mark)
        assert token in encode_chat(tokenizer, [{"role": "assistant", "content": f"a {mark} b"}])
        assert (token in encode_chat(tokenizer, [{"role": "user", "content": f"a {mark} b"}])) == (mark[1] == "t")


def test_turns_share_their_beginning() -> None:
    tokenizer = speaking(TEMPLATES["as it is"])
    messages: list[Any] = [{"role": "user", "content": "say <|im_end|> twice"}]
    before = encode_chat(tokenizer, messages)
    for role, content in (("assistant", "<|im_end|><|im_end|>"), ("user", "now <s>"), ("user", "bye")):
        messages.append({"role": role, "content": content})
        ids = encode_chat(tokenizer, messages)
        assert ids[: len(before)] == before
        before = ids


def test_a_space_before_a_text_is_put_where_it_was() -> None:
    """Where a tokenizer puts spaces behind special tokens, a spelled one changes nothing behind
    it."""
    template = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}"
    tokenizer = Tokenizer(sentencepiece(), chat_templates={"default": template})
    innocent = encode_chat(tokenizer, [{"role": "user", "content": one} for one in ("the", "fox")])
    spelled = encode_chat(tokenizer, [{"role": "user", "content": one} for one in ("the<s>", "fox")])
    at = innocent.index(2)
    assert spelled[:at] == innocent[:at]
    assert spelled[-len(innocent[at:]) :] == innocent[at:]
    assert tokenizer.decode(spelled) == tokenizer.decode(innocent).replace("the", "the<s>")


def test_what_a_normaliser_makes_a_token() -> None:
    backend = byte_level()
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    backend.add_special_tokens([AddedToken("<|turn|>", special=True, normalized=True)])
    tokenizer = Tokenizer(backend, chat_templates={"default": TEMPLATES["as it is"]})
    [turn] = tokenizer.encode("<|Turn|>")
    assert turn in tokenizer.encode("\uff1c|turn|>")
    ids = encode_chat(tokenizer, [{"role": "user", "content": "a <|Turn|>\uff1c|TURN|> b<|turn|>"}])
    assert turn not in ids
    assert tokenizer.decode(ids) == "user\na <|turn|><|turn|> b<|turn|>"


def test_many_special_tokens_and_many_spellings() -> None:
    backend = byte_level()
    backend.add_special_tokens([f"[control_{number}]" for number in range(1000)])
    tokenizer = Tokenizer(backend, chat_templates={"default": TEMPLATES["as it is"]})
    content = "[control_7][control_70][control_700] <<|im_end|>|im_end|>" * 500
    ids = encode_chat(tokenizer, [{"role": "user", "content": content}])
    assert len([one for one in ids if one in tokenizer.token_bytes.special_ids]) == 2
    assert tokenizer.decode(ids, False) == f"<|im_start|>user\n{content}<|im_end|>"


def test_it_can_be_turned_off() -> None:
    tokenizer = speaking(TEMPLATES["as it is"])
    messages = [{"role": "user", "content": "<|im_end|>"}]
    [end] = tokenizer.encode("<|im_end|>")
    assert encode_chat(tokenizer, messages).count(end) == 1
    assert encode_chat(tokenizer, messages, parse_special=True).count(end) == 2
    assert encode_chat(tokenizer.parsing_special(), messages).count(end) == 2
    assert encode_chat(tokenizer.parsing_special(), messages, parse_special=False).count(end) == 1


@given(text=CONTENTS.map("".join), special=st.booleans())
def test_texts_that_are_no_messages(text: str, special: bool) -> None:
    tokenizer = Tokenizer(sentencepiece())
    ids = SpelledTokens(tokenizer, None, text, parse_special=False).encode(text, add_special_tokens=special)
    assert controls(tokenizer, ids) == [1] * special
    assert tokenizer.decode(ids) == text


# -- models ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("spelled")
    make_checkpoint("llama", path, vocab_size=600, max_position_embeddings=1024)
    byte_level().save(str(path / "tokenizer.json"))
    template = TEMPLATES["as it is"] + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return path


@pytest.mark.parametrize("parses", [False, True])
def test_chats_of_a_model(make_llm: MakeLLM, folder: Path, parses: bool) -> None:
    """Alone, blended, in a session and in its next turn."""
    llm: LLM = make_llm(folder, parse_special=parses)
    assert llm.tokenizer is not None
    [end] = llm.tokenizer.encode("<|im_end|>")
    asked: dict[str, Any] = {"role": "user", "content": "the <|im_end|> fox"}
    output = llm.chat([asked], greedy(1))[0]
    assert output.prompt == "<|im_start|>user\nthe <|im_end|> fox<|im_end|><|im_start|>assistant\n"
    assert output.prompt_token_ids.count(end) == 1 + parses
    marked = llm.chat([{**asked, "segment": True}], greedy(1), blend=BlendParams())[0]
    assert marked.prompt_token_ids.count(end) == 1 + parses
    assert marked.blend is not None
    assert not marked.blend.unplaced
    with llm.session() as session:
        ids = session.chat([asked], greedy(1)).prompt_token_ids
        assert ids == output.prompt_token_ids
        more = session.chat([asked], greedy(1)).prompt_token_ids
        assert more.count(end) == 3 + 2 * parses
    assert llm.generate("the <|im_end|> fox", greedy(1))[0].prompt_token_ids.count(end) == 1
