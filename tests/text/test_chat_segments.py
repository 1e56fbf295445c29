"""Marked texts of chats: where they stand in the prompt, and ``LLM.chat(blend=)``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.sessions.test_session_chat import chatty, folder  # noqa: F401 - fixtures
from tests.small_llms import greedy

from quire import LLM, BlendParams, InvalidArgument
from quire.base.segments import Segment
from quire.text.chat_rendering import Message, render_chat
from quire.text.chat_segments import SIGN, cut_at_segments, first_of, without_segments

PLAIN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
TEMPLATES = {
    "plain": PLAIN,
    "trimmed": PLAIN.replace("m.content }}", "m.content | trim }}"),
    "parts": "{% for m in messages %}[{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}({{ p.text }}){% endfor %}{% endif %}]{% endfor %}",
    "backwards": PLAIN.replace("in messages", "in messages | reverse"),
    "last": "{{ messages[-1].content }}",
    "twice": "{% for m in messages %}{{ m.content }}/{{ m.content }}{% endfor %}",
    "large": PLAIN.replace("m.content }}", "m.content | upper }}"),
    "some large": PLAIN.replace("m.content }}", "m.content | upper if 'x' in m.content else m.content }}"),
    "no signs": PLAIN + "{% for m in messages %}{% if '" + SIGN + "' in m.content %}{{ raise_exception('no') }}"
    "{% endif %}{% endfor %}",
    "lengths": "{% for m in messages %}{{ m.content | length }} {{ m.content }}{% endfor %}",
    "tails": "{% for m in messages %}{{ m.content }}{{ '!' if 'x' in m.content }}{% endfor %}",
    "nothing": "{% set m = messages %}",
}


def marked(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, "segment": True, **more}


def cut(template: str, messages: Sequence[Message]) -> tuple[str, list[Any], tuple[str, ...], dict[str, str]]:
    bare, texts = without_segments(messages)
    render = partial(render_chat, template)
    text = render(bare)
    parts, unplaced = cut_at_segments(text, bare, texts, render)
    return text, list(parts), unplaced, texts


def contents(parts: Sequence[Any]) -> list[Any]:
    return [part.content if isinstance(part, Segment) else part for part in parts]


TEXTS = st.text("ab x<|>e/\n ", max_size=6)
PARTS = st.builds(lambda text, mark: {"type": "text", "text": text, "segment": mark}, TEXTS, st.sampled_from([True, False, None]))  # fmt: skip
MESSAGES = st.lists(
    st.one_of(
        st.builds(lambda text, mark: {"role": "user", "content": text, "segment": mark}, TEXTS, st.booleans()),
        st.builds(lambda parts: {"role": "user", "content": parts}, st.lists(PARTS, max_size=4)),
    ),
    min_size=1,
    max_size=4,
)


@given(template=st.sampled_from(sorted(TEMPLATES)), messages=MESSAGES, count=st.integers(0, 40))
def test_whatever_is_cut_is_the_prompt(template: str, messages: list[Any], count: int) -> None:
    text, parts, unplaced, texts = cut(TEMPLATES[template], messages)
    assert "".join(contents(parts)) == text
    kept = first_of(parts, count)
    assert "".join(contents(kept)) == text[:count]
    assert [type(part) for part in kept] == [type(part) for part in parts]
    whole = {
        text for content in texts.values() for text in (content, content.lstrip(), content.rstrip(), content.strip())
    }
    found = [part.content for part in parts if isinstance(part, Segment)]
    assert set(found) <= whole - {""}
    assert set(unplaced) <= set(texts)
    placed = [content.strip() for path, content in texts.items() if path not in unplaced]
    assert {one.strip() for one in found} == set(placed)
    if template in ("plain", "trimmed", "parts", "backwards"):
        # Such templates write every text, so that only empty ones have no place.
        assert {path for path, content in texts.items() if content.strip()} == set(texts) - set(unplaced)
    if template in ("no signs", "nothing"):
        assert len(parts) == 1
        assert set(unplaced) == set(texts)


def test_places() -> None:
    """Not where the text stands too: in another text, in the template's own, in its double."""
    messages = [
        {"role": "user", "content": [marked("end"), {"type": "text", "text": "the end"}, marked("end")]},
        {"role": "tool", "content": "user", "segment": True},
    ]
    text, parts, unplaced, _ = cut(PLAIN, messages)
    assert text == "<|user|>end\nthe end\nend<|end|><|tool|>user<|end|>"
    assert parts == ["<|user|>", Segment("end"), "\nthe end\n", Segment("end"), "<|end|><|tool|>", Segment("user"), "<|end|>"]  # fmt: skip
    assert unplaced == ()


def test_texts_that_a_template_changes() -> None:
    """They are no segments, and the others are."""
    messages = [{"role": "user", "content": text, "segment": True} for text in ("a b", "ax", " c ", "dx", "")]
    _, parts, unplaced, _ = cut(TEMPLATES["some large"], messages)
    assert [part.content for part in parts if isinstance(part, Segment)] == ["a b", " c "]
    assert unplaced == ("messages.1", "messages.3", "messages.4")
    text, parts, unplaced, _ = cut(TEMPLATES["tails"], messages[:2])
    assert (text, parts, unplaced) == ("a bax!", [Segment("a b"), "ax!"], ("messages.1",))
    # Not for ever: each costs a rendering.
    many = [{"role": "user", "content": "x", "segment": True}] * 30
    renderings = []

    def render(messages: Sequence[Message]) -> str:
        renderings.append(messages)
        return render_chat(TEMPLATES["some large"], messages)

    bare, texts = without_segments(many)
    assert cut_at_segments(render(bare), bare, texts, render) == (["<|user|>X<|end|>" * 30], tuple(texts))
    assert len(renderings) <= 5


def test_templates_see_no_marks() -> None:
    messages = [{"role": "user", "content": [marked("a b"), {"type": "text", "text": "c", "segment": None}]}]
    text, parts, _, _ = cut("{% for m in messages %}{{ m | tojson }}{% endfor %}", messages)
    assert text == '{"role": "user", "content": "a b\\nc"}'
    assert Segment("a b") in parts
    messages[0]["segment"] = False
    parts_template = (
        "{% for m in messages %}{{ m.role }}{% for p in m.content %}{{ p | tojson }}{% endfor %}{% endfor %}"
    )
    text, _, unplaced, _ = cut(parts_template, messages)
    assert text == 'user{"type": "text", "text": "a b"}{"type": "text", "text": "c"}'
    assert unplaced == ()


def test_signs_in_messages() -> None:
    text, parts, unplaced, _ = cut(PLAIN, [{"role": "user", "content": f"a{SIGN}0{SIGN}", "segment": True}])
    assert (parts, unplaced) == ([text], ("messages.0",))


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "user", "content": [marked("a", segment=1)]}, "messages.0.content.0.segment"),
        ({"role": "user", "content": "a", "segment": "yes"}, "messages.0.segment"),
        ({"role": "user", "content": [{"type": "text", "text": "a"}], "segment": True}, "messages.0.segment"),
        ({"role": "user", "content": [{"text": 3, "segment": True}]}, "messages.0.content.0.segment"),
        ({"role": "assistant", "tool_calls": [{}], "segment": True}, "messages.0.segment"),
    ],
)
def test_malformed_marks(message: Message, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        without_segments([message])
    assert caught.value.field == field


@pytest.mark.parametrize("messages", ["text", 5, [5], [{"role": 3}], {"role": "user"}, [{"content": 4}]])
def test_other_faults_are_left_to_templates(messages: Any) -> None:
    assert without_segments(messages)[1] == {}


# -- LLM.chat --------------------------------------------------------------------------------------

DOCUMENTS = ["def area(width, height):\n    return width * height\n" * 4, "class Stack:\n    items = []\n" * 6]


def chat_about(*documents: str) -> list[Message]:
    return [{"role": "user", "content": [*map(marked, documents), {"type": "text", "text": "what is it?"}]}]


def test_chats_are_blended(chatty: LLM) -> None:  # noqa: F811
    messages = chat_about(DOCUMENTS[1], DOCUMENTS[0])
    params = BlendParams(ratio=0.0, least=1, keep=False)
    (plain,) = chatty.chat(messages, greedy(4))
    assert plain.blend is None
    unmarked = without_segments(messages)[0]
    (expected,) = chatty.chat(unmarked, greedy(4))
    assert plain.prompt_token_ids == expected.prompt_token_ids
    assert plain.prompt == expected.prompt
    chatty.reset_prefix_cache()
    warmed = chatty.warm(DOCUMENTS)
    assert all(one.kept == one.tokens >= 32 for one in warmed)
    (output,) = chatty.chat(messages, greedy(4), blend=params)
    assert output.blend is not None
    assert output.blend.unplaced == ()
    assert output.blend.blended == sum(one.tokens for one in warmed)
    assert output.prompt == plain.prompt
    tokenizer = chatty.tokenizer
    assert tokenizer is not None
    assert tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False) == plain.prompt
    # All computed anew, it is what its tokens give.
    (exact,) = chatty.chat(messages, greedy(4), blend=BlendParams(ratio=1.0, least=1))
    (again,) = chatty.generate([exact.prompt_token_ids], greedy(4))
    assert exact.prompt_token_ids == output.prompt_token_ids
    assert exact.outputs[0].token_ids == again.outputs[0].token_ids


def test_several_chats(chatty: LLM) -> None:  # noqa: F811
    """Each has its own segments, and says which of its texts are none."""
    one, two = chat_about(DOCUMENTS[0]), chat_about(DOCUMENTS[1], f"{SIGN}")
    outputs = chatty.chat([one, two], greedy(2), blend=BlendParams(ratio=0.0, least=1, keep=False))
    assert [output.blend.unplaced for output in outputs if output.blend is not None] == [
        (),
        ("messages.0.content.0", "messages.0.content.1"),
    ]
    with pytest.raises(InvalidArgument, match="segment"):
        chatty.chat([{"role": "user", "content": "a", "segment": 1}])
    with pytest.raises(InvalidArgument, match="blend"):
        chatty.chat(one, blend=True)  # type: ignore[arg-type]
