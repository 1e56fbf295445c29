"""The Chat view: stories of people who talk to a model, branch, compare, and come back."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.inspector.conftest import Visit, Watch, engine, small_model
from tests.inspector.page_use import close_all, expect, findings, sideways, told
from tests.inspector.test_shell import HOSTILE
from tests.ports import lasting_port
from tests.server.conftest import OPTIONS, TEMPLATE, Served, serving, shallow_copy, wait_for
from tests.server.killable import killable

import quire_inspector
from quire.base.types import Step
from quire.server.http.settings import ServerSettings
from quire.server.openai import chat, generation

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page, Route

SHORT = {"sampling": {"max_tokens": 12, "temperature": 0}}
TEXT = """## A heading

For $ax^2 + bx = 0$ and \\(\\vec{v}\\), which cost $5 and $6:

$$x = \\frac{-b}{2a} \\overbrace{a+b}^n \\xrightarrow{f}$$

```python
def add(a: int) -> int:  # adds
    return a + 1
```

| case | roots |
|---|---:|
| one | 2 |

1. First
   - nested **bold** and `inline`
2. [link](https://example.org/a) ![picture](https://example.org/x.png)
"""


@contextmanager
def talking(
    visit: Visit, url: str, settings: dict[str, Any] | None = None, **options: Any
) -> Iterator[tuple[Page, Watch]]:
    """Open a new conversation, whose answers are short, and the same each time."""
    habits = {"name": "quire.habits", "value": json.dumps({**SHORT, **(settings or {})})}
    state = {"cookies": [], "origins": [{"origin": url.partition("/#")[0], "localStorage": [habits]}]}
    with visit(url, storage_state=state, **options) as (page, watch):
        expect(page.get_by_text("What shall we talk about?")).to_be_visible()
        yield page, watch


def field(page: Page) -> Locator:
    return page.get_by_label("Message", exact=True)


def settled(page: Page) -> None:
    """Wait until no answer is under way."""
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
    expect(page.locator("article[aria-busy=true]")).to_have_count(0)


def ask(page: Page, text: str) -> None:
    before = page.locator("article.role-assistant").count()
    field(page).fill(text)
    field(page).press("Enter")
    expect(page.locator("article.role-assistant")).not_to_have_count(before)
    settled(page)


def answers(page: Page) -> Locator:
    return page.locator("article.role-assistant")


def questions(page: Page) -> Locator:
    return page.locator("article.role-user")


def figure(message: Locator, label: str) -> int:
    """A number of the bar below an answer."""
    row = message.locator(".why-row")
    expect(row).to_be_visible()
    found = re.search(rf"([\d,]+)\s+{label}", row.inner_text())
    assert found is not None, row.inner_text()
    return int(found[1].replace(",", ""))


def written(page: Page) -> dict[str, Any]:
    """The browser's copy of the conversation that is shown, once the server has it too."""
    name = "new URLSearchParams(location.hash.split('?')[1]).get('id')"
    copy = f"""JSON.parse(localStorage['quire.chat.' + {name}] ?? '{{"dirty": true}}')"""
    found: dict[str, Any] = {}

    def stored() -> bool:
        found.update(page.evaluate(copy))
        return not found["dirty"] and not any(node.get("pending") for node in found["document"]["nodes"].values())

    wait_for(stored)
    return found


def tree(page: Page) -> Any:
    """The messages of the conversation that is shown, as the server has them."""
    found = written(page)
    read = page.evaluate("(url) => fetch(url).then((one) => one.json())", f"/v1/chats/{found['id']}")
    assert read["document"] == found["document"]
    return found["document"]["nodes"]


def menu(page: Page, message: Locator, item: str) -> None:
    message.focus()
    page.keyboard.press("m")
    page.get_by_role("dialog").get_by_role("button", name=item).click()


def bring(page: Page, tmp_path: Path, messages: Any) -> None:
    """Import a conversation."""
    file = tmp_path / "brought.json"
    file.write_text(json.dumps(messages))
    page.locator("input[accept]").set_input_files(file)


# -- talking ---------------------------------------------------------------------------------------


def test_a_conversation(visit: Visit, inspected: Served) -> None:
    with talking(visit, inspected.url) as (page, watch):
        expect(page.get_by_role("link", name="Chat")).to_have_attribute("aria-current", "page")
        ask(page, "def add(a, b):\n    return")
        ask(page, "and sub?")
        expect(answers(page)).to_have_count(2)
        first, second = answers(page).all()
        assert figure(first, "written") == 12
        assert figure(second, "reused") >= 12, "the first question and its answer"
        expect(page.locator(".context")).to_contain_text("tokens of the context")
        expect(page.get_by_role("navigation", name="Conversations")).to_contain_text("def add(a, b):")
        second.locator(".why-row").click()
        expect(second.locator(".why-more")).to_contain_text("tokens of the prompt whose state was there")
        page.reload()
        expect(answers(page)).to_have_count(2)
        needless = re.compile("vendor/(d3|uPlot|katex)")
        assert not any(needless.search(one) for one in watch.requests), "what is not needed is not loaded"
        for link, view in (("Its pages", "pages"), ("In the history", "history")):
            second.locator(".why-row").click()
            second.get_by_role("button", name=link).click()
            page.wait_for_selector(f".view-{view}")
            page.go_back()
    close_all(inspected.client)


def test_other_views_look_the_same_behind_it(visit: Visit, inspected: Served) -> None:
    with talking(visit, inspected.url) as (page, _):
        ask(page, "x")
        page.get_by_role("navigation", name="Views").get_by_role("link", name="History").click()
        rows = page.get_by_role("treeitem")
        expect(rows.first).to_be_visible()
        # Each view has styles of its own. A row may be drawn anew, and one that is gone has none.
        expect(rows.first).to_have_css("display", "grid")
        page.get_by_role("navigation", name="Views").get_by_role("link", name="Chat").click()
        expect(answers(page)).to_have_count(1)
    close_all(inspected.client)


def test_an_answer_goes_on_while_another_view_is_shown(visit: Visit, inspected: Served) -> None:
    with talking(visit, inspected.url, {"sampling": {"temperature": 0, "max_tokens": 150, "ignore_eos": True}}) as (
        page,
        _,
    ):
        field(page).fill("class Queue:")
        field(page).press("Enter")
        expect(answers(page).first.locator(".markdown")).not_to_be_empty()
        page.get_by_role("navigation", name="Views").get_by_role("link", name="History").click()
        page.wait_for_selector(".view-history")
        page.get_by_role("navigation", name="Views").get_by_role("link", name="Chat").click()
        settled(page)
        assert figure(answers(page).last, "written") > 100
        page.get_by_role("button", name=re.compile("^More about")).first.click()
        page.get_by_role("dialog").get_by_role("button", name="Delete").click()
        page.get_by_role("dialog").get_by_role("button", name="Delete").click()
        wait_for(lambda: told(inspected.client, "/v1/sessions")["data"] == [])


def test_a_page_that_may_not_edit_chats_too(visit: Visit, looked_at: Served) -> None:
    with talking(visit, looked_at.url) as (page, watch):
        ask(page, "x = 1")
        ask(page, "y = 2")
        # The answer is tokenised anew, and may begin otherwise than it was written.
        assert figure(answers(page).last, "reused") >= 8, "the prefix cache has the first question"
        assert not any("/v1/sessions" in one for one in watch.requests)
        answers(page).last.focus()
        page.keyboard.press("m")
        expect(page.get_by_role("dialog").get_by_role("button", name="Commit")).to_be_disabled()
        page.keyboard.press("Escape")
    assert told(looked_at.client, "/v1/sessions")["data"] == []


def test_a_model_without_a_template_has_the_playground(visit: Visit, tmp_path: Path) -> None:
    shallow_copy(tmp_path / "bare", "chat_template*")
    config = tmp_path / "bare" / "tokenizer_config.json"
    fields = json.loads(config.read_text())
    fields.pop("chat_template", None)
    config.write_text(json.dumps(fields))
    with engine(tmp_path / "bare") as llm, serving(llm) as served, visit(served.url) as (page, _):
        expect(page.get_by_role("link", name="Playground")).to_have_attribute("aria-current", "page")


def test_stop_keeps_what_was_written_and_continue_goes_on(visit: Visit, inspected: Served) -> None:
    with talking(visit, inspected.url, {"sampling": {"temperature": 0, "max_tokens": 2000}}) as (page, _):
        field(page).fill("class Stack:")
        field(page).press("Enter")
        expect(answers(page).first.locator(".markdown")).not_to_be_empty()
        page.keyboard.press("Escape")
        settled(page)
        expect(answers(page).first.locator(".why-row")).to_contain_text("stopped")
        (before,) = [one["content"] for one in tree(page).values() if one["role"] == "assistant"]
        shown = answers(page).first.locator(".markdown").inner_text()
        answers(page).first.get_by_role("button", name="Continue").click()
        wait_for(lambda: answers(page).first.locator(".markdown").inner_text() != shown)
        page.keyboard.press("Escape")
        settled(page)
        (after,) = [one["content"] for one in tree(page).values() if one["role"] == "assistant"]
        assert after.startswith(before)
        assert len(after) > len(before)
    close_all(inspected.client)


# -- branches --------------------------------------------------------------------------------------


def test_editing_a_message_forks_there(visit: Visit, inspected: Served) -> None:
    with talking(visit, inspected.url) as (page, _):
        for number in range(3):
            ask(page, f"question {number}")
        nodes = tree(page)
        first = next(one for one in nodes.values() if one["role"] == "assistant")
        held = first["usage"]["prompt"]
        questions(page).nth(1).focus()
        page.keyboard.press("e")
        page.get_by_label("The message").fill("another question")
        page.keyboard.press("Control+Enter")
        settled(page)
        expect(answers(page)).to_have_count(2)
        expect(questions(page).nth(1).locator(".sibling-count")).to_have_text("2/2")
        # Nothing before the message runs again. What a weak model writes may be tokenised otherwise
        # in later prompts, so the first question is sure.
        assert figure(answers(page).last, "reused") >= held - 1
        page.get_by_role("button", name="Earlier branch").click()
        expect(answers(page)).to_have_count(3)
        expect(questions(page).nth(1)).to_contain_text("question 1")
        page.keyboard.press("ArrowRight")
        expect(questions(page).nth(1)).to_contain_text("another question")
        made = tree(page)
        assert len(made) == 8
        sessions = {one["id"]: one for one in told(inspected.client, "/v1/sessions")["data"]}
        assert first["session"]["id"] in {one["parent"] for one in sessions.values()}, "a fork of its session"
        page.get_by_role("button", name="Branches", exact=True).click()
        expect(page.get_by_role("treeitem")).to_have_count(8)
        page.get_by_role("treeitem", name="You: question 2").click()
        expect(answers(page)).to_have_count(3)
    close_all(inspected.client)


def test_several_answers_to_choose_from(visit: Visit, inspected: Served) -> None:
    with talking(visit, inspected.url, {"sampling": {"max_tokens": 8, "temperature": 1, "seed": 1}}) as (page, _):
        ask(page, "x")
        page.get_by_label("Answers at once").select_option("3")
        field(page).fill("choose")
        field(page).press("Enter")
        settled(page)
        box = page.get_by_role("region", name="3 answers to choose from")
        expect(box.locator("article")).to_have_count(3)
        texts = box.locator(".markdown").all_inner_texts()
        assert len(set(texts)) > 1, "each has a seed of its own"
        tree(page)
        page.reload()
        expect(box.locator("article")).to_have_count(3)
        box.get_by_role("button", name="Take answer 2").click()
        expect(box).to_have_count(0)
        expect(answers(page).last.locator(".sibling-count")).to_have_text("2/3")
        assert answers(page).last.locator(".markdown").inner_text() == texts[1]
        menu(page, answers(page).last, "Delete from here on")
        expect(page.locator(".sibling-count")).to_have_text(re.compile("/2"))
        assert sum(one.get("removed", False) for one in tree(page).values()) == 1
    close_all(inspected.client)


def test_two_branches_get_one_question(visit: Visit, inspected: Served) -> None:
    with talking(visit, inspected.url) as (page, _):
        ask(page, "one")
        answers(page).last.focus()
        page.keyboard.press("r")
        settled(page)
        menu(page, answers(page).last, "Compare with the branch beside")
        expect(page.locator(".thread")).to_have_count(2)
        field(page).fill("to both")
        field(page).press("Enter")
        settled(page)
        for thread in page.locator(".thread").all():
            expect(thread.locator("article")).to_have_count(4)
            expect(thread).to_contain_text("to both")
        page.reload()
        expect(page.locator(".thread")).to_have_count(2)
        page.get_by_role("button", name="Close this branch").click()
        expect(page.locator(".thread")).to_have_count(1)
    close_all(inspected.client)


def test_going_back_leaves_a_branch_beside(visit: Visit, inspected: Served) -> None:
    with talking(visit, inspected.url) as (page, _):
        for number in range(3):
            ask(page, f"question {number}")
        page.get_by_role("button", name="Branches", exact=True).click()
        slider = page.get_by_label("Rewind")
        slider.focus()
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowLeft")
        expect(answers(page)).to_have_count(2)
        ask(page, "otherwise")
        expect(questions(page).last.locator(".sibling-count")).to_have_text("2/2")
        assert len(tree(page)) == 8
        box = slider.bounding_box()
        assert box is not None
        middle = box["y"] + box["height"] / 2
        page.mouse.move(box["x"] + box["width"] - 8, middle)
        page.mouse.down()
        page.mouse.move(box["x"] + 2, middle, steps=5)
        page.mouse.up()
        expect(page.locator(".messages article")).to_have_count(1)
        ask(page, "from the start")
        assert len(tree(page)) == 10
    close_all(inspected.client)


@pytest.mark.parametrize(("button", "mode"), [("Keep what follows", "exact"), ("Keep it, blended", "blend")])
def test_an_edit_in_the_middle(button: str, mode: str, visit: Visit, inspected: Served) -> None:
    with talking(visit, inspected.url) as (page, _):
        ask(page, "a first question about apples")
        # So long that blending pays: below 256 tokens everything is computed in full.
        ask(page, "second " + "tell me more of it " * 100)
        kept = answers(page).last.locator(".markdown").inner_text()
        questions(page).first.focus()
        page.keyboard.press("e")
        page.get_by_label("The message").fill("a first question about pears")
        page.get_by_role("button", name=button).click()
        expect(page.locator("#toasts")).to_contain_text("Edited in the middle")
        expect(questions(page).first).to_contain_text("pears")
        assert answers(page).last.locator(".markdown").inner_text() == kept
        held = [one for one in tree(page).values() if one.get("copied") and one.get("session")]
        assert [one["session"]["exact"] for one in held] == [mode == "exact"]
        ask(page, "third")
        assert figure(answers(page).last, "reused") > 256, "the session of the edit is continued"
    close_all(inspected.client)


def test_an_edit_of_a_message_that_an_answer_quotes(visit: Visit, inspected: Served, tmp_path: Path) -> None:
    with talking(visit, inspected.url) as (page, _):
        said = [
            {"role": "user", "content": "apples"},
            {"role": "assistant", "content": "You said apples, and apples it is."},
            {"role": "user", "content": "apples"},
            {"role": "assistant", "content": "Once more."},
        ]
        bring(page, tmp_path, said)
        questions(page).last.focus()
        page.keyboard.press("e")
        page.get_by_label("The message").fill("pears")
        page.get_by_role("button", name="Keep what follows").click()
        expect(page.locator("#toasts")).to_contain_text("Edited in the middle")
        ask(page, "and now?")
        session = [one["session"]["id"] for one in tree(page).values() if one.get("session")][-1]
        text = told(inspected.client, f"/v1/sessions/{session}")["text"]
        assert re.findall("apples|pears", text) == ["apples", "apples", "apples", "pears"]
    close_all(inspected.client)


# -- coming back -----------------------------------------------------------------------------------


def test_two_windows_share_a_conversation(visit: Visit, inspected: Served) -> None:
    with talking(visit, inspected.url) as (page, watch):
        watch.allow("404")
        ask(page, "from the first window")
        tree(page)
        other = page.context.new_page()
        other.goto(page.url)
        expect(answers(other)).to_have_count(1)
        ask(other, "from the second window")
        expect(questions(page).filter(has_text="from the second window")).to_have_count(0)
        page.get_by_role("button", name="Branches", exact=True).click()
        expect(page.get_by_role("treeitem", name="You: from the second window")).to_be_visible()
        other.get_by_role("button", name=re.compile("^More about")).first.click()
        other.get_by_role("dialog").get_by_role("button", name="Delete").click()
        other.get_by_role("dialog").get_by_role("button", name="Delete").click()
        expect(page.get_by_text("Another window has deleted this conversation")).to_be_visible()
        expect(answers(page)).to_have_count(1)
        page.get_by_role("button", name="Keep it").click()
        assert len(tree(page)) == 4
    close_all(inspected.client)


def test_keys_do_not_see_each_others_conversations(visit: Visit, inspected: Served) -> None:
    settings = ServerSettings(api_key=("first-key", "second-key"), allow_edits=True)
    with serving(inspected.llm, settings, authorization="Bearer first-key") as served:
        with talking(visit, f"{served.url}/#key=first-key") as (page, watch):
            ask(page, "of the first key")
            written(page)
            before = len(watch.requests)
            page.get_by_role("button", name="API key").click()
            page.get_by_role("dialog").get_by_label("Key of this server").fill("second-key")
            page.get_by_role("dialog").get_by_role("button", name="Connect").click()
            expect(page.get_by_text("What shall we talk about?")).to_be_visible()
            expect(page.get_by_role("navigation", name="Conversations")).not_to_contain_text("of the first key")
            # By now it has looked for what this key has, and sent what that lacks.
            wait_for(lambda: "GET /v1/chats" in watch.requests[before:])
            page.wait_for_timeout(300)
            theirs = {"authorization": "Bearer second-key"}
            assert served.client.get("/v1/chats", headers=theirs).json()["data"] == []
            assert len(told(served.client, "/v1/chats")["data"]) == 1
        close_all(served.client)


def test_a_killed_server_comes_back(visit: Visit, chat_folder: Path, tmp_path: Path) -> None:
    port = lasting_port()
    options = {**OPTIONS, "state_dir": tmp_path / "state"}
    settings = {"allow_edits": True}
    with (
        killable(chat_folder, tmp_path / "first", options=options, port=port, **settings) as first,
        talking(visit, first.url) as (page, watch),
    ):
        watch.allow("ERR_", "Failed to load resource", "net::")
        ask(page, "before the end")
        answer = answers(page).last.locator(".markdown").inner_text()
        tree(page)
        first.kill()
        expect(page.locator("#banner")).to_be_visible()
        field(page).fill("typed while it was away")
        field(page).press("Enter")
        expect(page.locator("#toasts")).to_contain_text("Your text is kept")
        expect(field(page)).to_have_value("typed while it was away")
        with killable(chat_folder, tmp_path / "second", options=options, port=port, **settings):
            expect(page.locator("#banner")).to_be_hidden()
            page.reload()
            expect(field(page)).to_have_value("typed while it was away")
            expect(answers(page).last.locator(".markdown")).to_have_text(answer)
            field(page).press("Enter")
            settled(page)
            expect(answers(page)).to_have_count(2)
            written(page)  # Another browser has only what the server has.
            assert any(one.endswith("/fork") for one in watch.requests), "its session is there again"
            with talking(visit, first.url) as (other, seen):
                other.get_by_role("navigation", name="Conversations").get_by_role("button").filter(
                    has_text="before the end"
                ).first.click()
                expect(answers(other)).to_have_count(2)
                ask(other, "in another browser")
                assert any(one.endswith("/fork") for one in seen.requests)


def test_typed_text_is_kept_until_it_is_sent(visit: Visit, inspected: Served) -> None:
    with talking(visit, inspected.url) as (page, _):
        field(page).fill("not sent yet")
        page.reload()
        expect(field(page)).to_have_value("not sent yet")
        ask(page, "sent")
        expect(field(page)).to_have_value("")
        questions(page).first.focus()
        page.keyboard.press("e")
        page.get_by_label("The message").fill("half an edit")
        page.reload()
        expect(field(page)).to_have_value("")
        questions(page).first.focus()
        page.keyboard.press("e")
        expect(page.get_by_label("The message")).to_have_value("half an edit")
    close_all(inspected.client)


# -- what goes wrong -------------------------------------------------------------------------------


def test_a_pasted_megabyte_is_a_file_and_nothing_is_lost(visit: Visit, inspected: Served) -> None:
    with talking(visit, inspected.url) as (page, watch):
        watch.allow("400")
        field(page).focus()
        page.evaluate(
            """() => { const data = new DataTransfer(); data.setData("text/plain", "word ".repeat(200000));
            document.activeElement.dispatchEvent(new ClipboardEvent("paste", {clipboardData: data, bubbles: true, cancelable: true})); }"""
        )
        expect(page.get_by_role("list", name="Attached files")).to_contain_text("pasted-1.txt")
        field(page).fill("What is in it?")
        field(page).press("Enter")
        error = answers(page).last.get_by_role("alert")
        expect(error).to_contain_text("maximum context length")
        expect(error).to_contain_text("take files out")
        expect(questions(page).last).to_contain_text("pasted-1.txt")
        questions(page).last.focus()
        page.keyboard.press("e")
        expect(page.get_by_label("The message")).to_have_value("What is in it?")
    close_all(inspected.client)


def test_a_wrong_schema_says_where_to_mend_it(visit: Visit, inspected: Served) -> None:
    with talking(visit, inspected.url, {"schema": "{oops"}) as (page, _):
        field(page).fill("x")
        field(page).press("Enter")
        expect(answers(page).last.get_by_role("alert")).to_contain_text("The JSON schema cannot be read as JSON")
        page.get_by_role("button", name="Settings", exact=True).click()
        page.get_by_label("JSON schema").fill(
            '{"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}'
        )
        page.get_by_label("JSON schema").press("Tab")
        answers(page).last.get_by_role("button", name="Try again").click()
        settled(page)
        expect(answers(page).last.locator(".markdown")).to_have_text('{"a":1}')
        expect(answers(page)).to_have_count(1)
    close_all(inspected.client)


def test_a_session_that_is_gone_costs_nothing_but_time(visit: Visit, inspected: Served) -> None:
    with talking(visit, inspected.url) as (page, watch):
        watch.allow("404")
        ask(page, "one")
        tree(page)
        close_all(inspected.client)
        ask(page, "two")
        expect(page.locator(".message-error:not([hidden])")).to_have_count(0)
        expect(answers(page)).to_have_count(2)
    close_all(inspected.client)


def test_what_others_wrote_is_text(visit: Visit, inspected: Served, tmp_path: Path) -> None:
    with talking(visit, inspected.url) as (page, _):
        marked = "\n\n".join(
            [*HOSTILE, "[x](javascript:alert(1))", "[y](data:text/html,x)", "$\\href{javascript:alert(1)}{z}$"]
        )
        said = [
            {"role": "user", "content": marked},
            {"role": "assistant", "content": marked, "reasoning_content": marked},
        ]
        bring(page, tmp_path, [{"role": "system", "content": marked}, *said])
        expect(answers(page)).to_have_count(1)
        page.wait_for_timeout(500)
        assert (
            page.evaluate("document.querySelectorAll('.messages :is(img, script, iframe, svg:not(.icon))').length") == 0
        )
        assert (
            page.evaluate(
                "[...document.querySelectorAll('.messages a')].filter((one) => !/^https?:/.test(one.href)).length"
            )
            == 0
        )
        page.get_by_role("button", name="Branches", exact=True).click()
        expect(page.get_by_role("treeitem")).to_have_count(3)
        assert findings(page) == []


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "no JSON"),
        ('{"a": 1}', "holds no conversation"),
        ('[{"role": "wizard", "content": "x"}]', 'the role "wizard"'),
        ('[{"role": "user", "content": [{"type": "image_url"}]}]', "message 1 has a part that is no text"),
    ],
)
def test_a_file_that_is_no_conversation(
    content: str, said: str, visit: Visit, inspected: Served, tmp_path: Path
) -> None:
    with talking(visit, inspected.url) as (page, _):
        (tmp_path / "wrong.json").write_text(content)
        page.locator("input[accept]").set_input_files(tmp_path / "wrong.json")
        expect(page.locator("#toasts")).to_contain_text(said)


def test_a_full_pool(visit: Visit, tmp_path: Path) -> None:
    """A pinned session of another program has most pages."""
    folder = small_model(tmp_path / "model")
    with engine(folder, kv_cache_memory="4MiB") as llm, serving(llm, ServerSettings(allow_edits=True)) as served:
        total = told(served.client, "/v1/state")["use"]["total"]
        length = int(0.7 * total) * llm.engine.runner.state.page_size
        body = {"prompt": [5] * length, "pin": True}
        pinned = served.client.post("/v1/sessions", json=body).json()["id"]
        with talking(visit, served.url) as (page, watch):
            watch.allow("400", "503")
            field(page).fill("tell me more of it " * 130)
            field(page).press("Enter")
            error = answers(page).last.get_by_role("alert")
            expect(error).to_contain_text("Unpin or delete")
            assert findings(page) == []
            served.client.delete(f"/v1/sessions/{pinned}")
            error.get_by_role("button", name="Try again").click()
            settled(page)
            expect(answers(page)).to_have_count(1)
            assert figure(answers(page).last, "written") > 0
        close_all(served.client)


def test_a_server_that_can_keep_no_more(visit: Visit, inspected: Served) -> None:
    """The browser keeps the conversation, and the server gets it as soon as there is room."""
    with (
        serving(inspected.llm, ServerSettings(allow_edits=True, max_chats=1)) as served,
        talking(visit, served.url) as (page, watch),
    ):
        watch.allow("429")
        ask(page, "the first")
        tree(page)
        answers(page).last.focus()
        page.keyboard.press("n")
        ask(page, "one too many")
        kept = page.get_by_role("alert")
        expect(kept).to_contain_text("kept in this browser only")
        expect(kept).to_contain_text("delete some conversations")
        page.reload()
        expect(questions(page)).to_contain_text("one too many")
        side = page.get_by_role("navigation", name="Conversations")
        side.get_by_role("button", name="More about the first").click()
        page.get_by_role("dialog").get_by_role("button", name="Delete").click()
        page.get_by_role("dialog").get_by_role("button", name="Delete").click()
        wait_for(lambda: [one["title"] for one in told(served.client, "/v1/chats")["data"]] == ["one too many"])
        expect(kept).to_have_count(0)
        close_all(served.client)


def test_a_template_that_fails(visit: Visit, tmp_path: Path) -> None:
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system messages here') }}{% endif %}"
    folder = small_model(tmp_path / "refusing", refusing + TEMPLATE)
    with engine(folder) as llm, serving(llm, ServerSettings(allow_edits=True)) as served:
        with talking(visit, served.url, {"system": "Be brief."}) as (page, watch):
            watch.allow("400")
            field(page).fill("x = 1")
            field(page).press("Enter")
            error = answers(page).last.get_by_role("alert")
            expect(error).to_contain_text("no system messages here")
            expect(error).to_contain_text("often a system message")
            expect(questions(page)).to_contain_text("x = 1")
            page.get_by_role("button", name="Settings", exact=True).click()
            page.get_by_label("System message").last.fill("")
            page.get_by_label("System message").last.press("Tab")
            expect(page.locator("article.role-system")).to_have_count(0)
            answers(page).last.get_by_role("button", name="Try again").click()
            settled(page)
            assert figure(answers(page).last, "written") > 0
        close_all(served.client)


def test_a_branch_that_another_window_deletes(visit: Visit, inspected: Served) -> None:
    with talking(visit, inspected.url) as (page, _):
        ask(page, "one")
        ask(page, "two")
        tree(page)
        other = page.context.new_page()
        other.goto(page.url)
        expect(answers(other)).to_have_count(2)
        field(page).fill("half a thought")
        menu(other, questions(other).last, "Delete from here on")
        other.get_by_role("dialog").get_by_role("button", name="Delete").click()
        expect(page.locator("#toasts")).to_contain_text("Another window has deleted this branch")
        expect(answers(page)).to_have_count(1)
        expect(field(page)).to_have_value("half a thought")
        field(page).press("Enter")
        settled(page)
        expect(answers(page)).to_have_count(2)
    close_all(inspected.client)


def test_a_conversation_that_opens_leaves_the_focus_on_a_message(visit: Visit, inspected: Served) -> None:
    """The browser's own copy is shown, and can be used, before the server has answered."""
    with talking(visit, inspected.url) as (page, _):
        ask(page, "one")
        ask(page, "two")
        tree(page)
        held: list[Route] = []
        for reader in (False, True):
            other = page.context.new_page()
            other.route("**/v1/chats/*", lambda route: held.append(route))
            other.goto(page.url)
            expect(answers(other)).to_have_count(2)
            expect(field(other)).not_to_be_focused()
            if reader:
                questions(other).last.focus()
            with other.expect_response("**/v1/chats/*") as answered:
                held.pop().continue_()
            answered.value.finished()
            other.wait_for_timeout(200)
            expect(questions(other).last if reader else field(other)).to_be_focused()
    close_all(inspected.client)


def test_what_is_said_while_a_conversation_is_written(visit: Visit, inspected: Served) -> None:
    """A slow write is not sent twice, and a message that comes meanwhile is written after it."""
    with talking(visit, inspected.url) as (page, _):
        held: list[Route] = []
        one_chat = "**/v1/chats/*"
        page.route(one_chat, lambda route: held.append(route))
        with page.expect_request(one_chat):
            ask(page, "quince")
        ask(page, "medlar")
        page.get_by_role("button", name="New chat").click()
        expect(answers(page)).to_have_count(0)
        with page.expect_response(lambda answer: answer.url.endswith("/v1/chats")):
            page.evaluate("new BroadcastChannel('quire.chats').postMessage('')")
        page.wait_for_timeout(200)
        assert [one.request.method for one in held] == ["PUT"]
        held.pop().continue_()
        page.unroute(one_chat)
        wait_for(lambda: bool(told(inspected.client, "/v1/chats?search=quince%20medlar")["data"]))
    close_all(inspected.client)


def test_an_answer_that_the_context_cuts(visit: Visit, chat_folder: Path) -> None:
    with engine(chat_folder, max_model_len=96) as llm, serving(llm, ServerSettings(allow_edits=True)) as served:
        with talking(visit, served.url, {"sampling": {"ignore_eos": True}}) as (page, watch):
            watch.allow("400")
            ask(page, "go on and on")
            message = answers(page).last
            expect(message.locator(".why-row")).to_contain_text("cut where the context ends")
            expect(page.locator(".context")).to_have_text(re.compile("96 / 96"))
            expect(page.locator(".context")).to_have_class(re.compile("full"))
            assert message.get_by_role("button", name="Continue").count() == 0, "there is no room to go on"
            ask(page, "and now? " * 40)
            error = answers(page).last.get_by_role("alert")
            expect(error).to_contain_text("go back to an earlier message")
            answers(page).first.focus()
            page.keyboard.press("b")
            expect(answers(page)).to_have_count(1)
        close_all(served.client)


# -- tools -----------------------------------------------------------------------------------------

CALL = 'Let me see.<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'


def test_tools_in_sessions(visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call is answered in the session that holds it, and what was said runs once."""
    shown = '{% if tools %}{{ tools | tojson }}<tool_call>{"name": ...}</tool_call>{% endif %}'
    folder, reading, said = small_model(tmp_path / "caller", shown + TEMPLATE), chat._reading, [CALL, "24 degrees."]

    def forced(*given: Any) -> Any:
        form, params = reading(*given)
        return form, params.replace(structured_outputs={"choice": [said.pop(0)]})

    monkeypatch.setattr(chat, "_reading", forced)
    tools = json.dumps([{"name": "weather", "parameters": {"type": "object"}}])
    settings = {"tools": tools, "sampling": {"max_tokens": 200, "temperature": 0}}
    with engine(folder) as llm, serving(llm, ServerSettings(allow_edits=True)) as served:
        with talking(visit, served.url, settings) as (page, watch):
            ask(page, "How warm is it?")
            expect(answers(page).last.locator(".call")).to_contain_text('"city": "Rome"')
            page.get_by_label("Result of weather").fill('{"degrees": 24}')
            page.reload()
            expect(page.get_by_label("Result of weather")).to_have_value('{"degrees": 24}')
            page.get_by_role("button", name="Send the results").click()
            expect(answers(page)).to_have_count(2)
            settled(page)
            expect(answers(page).last.locator(".markdown")).to_have_text("24 degrees.")
            expect(page.locator("article.role-tool .hl-attr")).to_have_text('"degrees"')
            nodes = [one for one in tree(page).values() if one["role"] == "assistant"]
            assert all(one.get("session") for one in nodes), "each answer is held"
            assert any(one.endswith("/fork") for one in watch.requests)
            assert figure(answers(page).last, "reused") >= nodes[0]["usage"]["prompt"] - 1
            assert findings(page) == []
        close_all(served.client)


# -- finding ---------------------------------------------------------------------------------------


def test_conversations_are_found_by_what_was_said(visit: Visit, inspected: Served) -> None:
    with talking(visit, inspected.url) as (page, _):
        ask(page, "a question about zebras")
        page.keyboard.press("Escape")
        answers(page).last.focus()
        page.keyboard.press("n")
        ask(page, "another about apples")
        side = page.get_by_role("navigation", name="Conversations")
        expect(side.get_by_role("heading", name="Today")).to_be_visible()
        for text in ("a question about zebras", "another about apples"):
            expect(side.locator(".chat-link", has_text=text)).to_have_count(1)
        tree(page)
        answers(page).last.focus()
        page.keyboard.press("/")
        page.keyboard.type("about zebras")
        expect(side.locator(".chat-link")).to_have_count(1)
        expect(side.locator(".found")).to_contain_text("a question about zebras")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        expect(questions(page).first).to_contain_text("zebras")
        side.get_by_role("searchbox").fill("<b>nowhere")
        expect(side).to_contain_text("Nothing matches")
        for one in told(inspected.client, "/v1/chats")["data"]:
            inspected.client.delete(f"/v1/chats/{one['id']}")
    close_all(inspected.client)


def test_what_stands_at_the_top_and_all_in_one_file(visit: Visit, inspected: Served, tmp_path: Path) -> None:
    with talking(visit, inspected.url) as (page, _):
        side = page.get_by_role("navigation", name="Conversations")
        for text in ("first of two", "second of two"):
            bring(page, tmp_path, [{**LLAMA[0], "conv": {**LLAMA[0]["conv"], "name": text}}])
            expect(side.locator(".chat-link").first).to_contain_text(text)
            written(page)
        side.get_by_role("button", name="More about first of two").click()
        page.get_by_role("dialog").get_by_role("button", name="Pin to the top").click()
        expect(side.get_by_role("heading", name="Pinned")).to_be_visible()
        expect(side.locator(".chat-link")).to_have_text(["first of two", "second of two"])
        written(page)
        page.reload()
        expect(side.locator(".chat-link")).to_have_text(["first of two", "second of two"])
        field(page).press("Control+Shift+O")
        expect(page.locator(".chat-title")).to_contain_text("New chat")
        with page.expect_download() as found:
            page.get_by_role("button", name="Export and more").click()
            page.get_by_role("dialog").get_by_role("button", name="All conversations").click()
        saved = tmp_path / "conversations.json"
        found.value.save_as(saved)
        assert sorted(one["title"] for one in json.loads(saved.read_text())) == ["first of two", "second of two"]
        for one in told(inspected.client, "/v1/chats")["data"]:
            inspected.client.delete(f"/v1/chats/{one['id']}")
        page.locator("input[accept]").set_input_files(saved)
        expect(page.locator("#toasts")).to_contain_text("2 conversations were imported")
        listed = told(inspected.client, "/v1/chats")["data"]
        assert sorted((one["title"], one["pinned"]) for one in listed) == [
            ("first of two", True),
            ("second of two", False),
        ]
        field(page).press("Control+k")
        expect(side.get_by_role("searchbox")).to_be_focused()
        page.keyboard.press("Shift+Escape")
        expect(field(page)).to_be_focused()
        assert findings(page) == []
        for one in listed:
            inspected.client.delete(f"/v1/chats/{one['id']}")


DROP = """(files) => { const data = new DataTransfer();
    for (const [name, type, text] of files) data.items.add(new File([text], name, { type }));
    const drop = (name) => document.querySelector(".messages").dispatchEvent(
        new DragEvent(name, { dataTransfer: data, bubbles: true, cancelable: true }));
    drop("dragover"); const shown = !document.querySelector(".chat-drop").hidden; drop("drop"); return shown; }"""


def test_files_are_dropped_anywhere_and_refused_by_what_they_are(visit: Visit, inspected: Served) -> None:
    with talking(visit, inspected.url) as (page, _):
        files = [["notes.md", "", "# notes"], ["a.png", "image/png", "x"], ["b.pdf", "application/pdf", "x"]]
        files += [["c.docx", "", "PK"], ["d.svg", "image/svg+xml", "<svg/>"], ["e.bin", "", "\0"]]
        assert page.evaluate(DROP, files), "it is shown where they may be dropped"
        attached = page.get_by_role("list", name="Attached files")
        expect(attached.locator(".name")).to_have_text(["notes.md", "d.svg"])
        expect(page.locator(".chat-drop")).to_be_hidden()
        for said in ("a.png is a picture", "b.pdf is a PDF", "c.docx is an office document", "e.bin is no text file"):
            expect(page.locator("#toasts")).to_contain_text(said)


def test_what_the_model_is_and_what_counts_by_default(visit: Visit, inspected: Served) -> None:
    with talking(visit, inspected.url) as (page, watch):
        watch.allow("400")
        page.get_by_role("button", name=inspected.context.model_name).click()
        expect(page.get_by_role("dialog", name="About the model")).to_contain_text("Context")
        assert findings(page) == []
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Settings", exact=True).click()
        usual = inspected.context.llm.default_params.top_p
        expect(page.get_by_label("Top p")).to_have_attribute("placeholder", f"{usual:g}")
        page.get_by_label("Further fields").fill('{"stop": "%", "logit_bias": {"5": -100}}')
        page.get_by_label("Further fields").press("Tab")
        with page.expect_request(lambda one: one.url.endswith("/v1/chat/completions")) as sent:
            ask(page, "x")
        assert sent.value.post_data_json["logit_bias"] == {"5": -100}
        for wrong, said in (('{"messages": []}', "must not have messages"), ('{"mirostat": 2}', "mirostat is not sup")):
            page.get_by_label("Further fields").fill(wrong)
            page.get_by_label("Further fields").press("Tab")
            ask(page, "y")
            expect(answers(page).last.get_by_role("alert")).to_contain_text(said)
    close_all(inspected.client)


def test_the_prompt_and_the_speed_are_told_while_they_run(
    visit: Visit, inspected: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "PROGRESS", 0.001)
    runner = inspected.context.llm.engine.runner
    execute = runner.execute

    def slow(step: Step) -> Any:
        """Run the prompt so slowly that the page can draw meanwhile."""
        time.sleep(0.5 if step.num_tokens > 100 else 0.0)
        return execute(step)

    monkeypatch.setattr(runner, "execute", slow)
    settings = {"sampling": {"temperature": 0, "max_tokens": 1500, "ignore_eos": True}}
    seen = """() => { window.seen = new Set(); new MutationObserver(() => {
        for (const one of document.querySelectorAll(".reading, .why-speed:not([hidden])")) if (one.textContent) seen.add(one.textContent);
        }).observe(document.body, { subtree: true, childList: true, characterData: true, attributes: true }); }"""
    with talking(visit, inspected.url, settings) as (page, _):
        page.evaluate(seen)
        field(page).fill("tell me more of it " * 150)
        field(page).press("Enter")
        speed = re.compile(r"[\d,]+ written, [\d.,]+ tokens/s")
        expect(page.locator(".why-speed")).to_have_text(speed)
        field(page).fill("too early")
        field(page).press("Enter")
        expect(page.locator("#toasts")).to_contain_text("Your text is kept")
        expect(field(page)).to_have_value("too early")
        page.keyboard.press("Escape")
        settled(page)
        expect(page.locator(".why-speed")).to_be_hidden()
        assert any(re.fullmatch(r"[\d,]+ of [\d,]+ tokens read", one) for one in page.evaluate("[...seen]"))
    close_all(inspected.client)


def test_prompts_and_settings_are_kept(visit: Visit, inspected: Served) -> None:
    with talking(visit, inspected.url) as (page, _):
        field(page).fill("Review this code: ")
        page.get_by_role("button", name="Prompts").click()
        page.get_by_role("button", name="Keep what is typed").click()
        page.get_by_role("dialog").get_by_label("Name").fill("<i>review</i>")
        page.get_by_role("dialog").get_by_role("button", name="Keep").click()
        expect(page.locator("#toasts")).to_contain_text("The prompt is kept")
        page.get_by_role("button", name="Settings", exact=True).click()
        page.get_by_label("System message").fill("Be brief.")
        page.get_by_label("Temperature").fill("0.5")
        page.get_by_label("Temperature").press("Tab")
        page.get_by_role("button", name="Keep these").click()
        page.get_by_role("dialog").get_by_label("Name").fill("brief")
        page.get_by_role("dialog").get_by_role("button", name="Keep").click()
        expect(page.get_by_label("Kept settings")).to_be_enabled()
        page.get_by_label("System message").fill("")
        page.get_by_label("System message").press("Tab")
        page.reload()
        field(page).fill("")
        field(page).press("/")
        page.get_by_role("dialog").get_by_role("button", name="<i>review</i>").first.click()
        expect(field(page)).to_have_value("Review this code:")
        page.get_by_role("button", name="Settings", exact=True).click()
        page.get_by_label("Kept settings").select_option("brief")
        expect(page.get_by_label("System message")).to_have_value("Be brief.")
        expect(page.get_by_label("Temperature")).to_have_value("0.5")
        assert findings(page) == []


# -- how it looks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_markdown_code_and_mathematics(scheme: str, visit: Visit, inspected: Served, tmp_path: Path) -> None:
    with talking(visit, inspected.url, color_scheme=scheme) as (page, _):
        calls = [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}}]
        messages = [
            {"role": "user", "content": "explain"},
            {"role": "assistant", "content": TEXT, "reasoning_content": "first think"},
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": "", "tool_calls": calls},
        ]
        bring(page, tmp_path, {"messages": messages})
        message = answers(page).first
        expect(message.locator(".katex").first).to_be_attached()
        expect(message.locator("code .hl-keyword").first).to_have_text("def")
        assert message.locator(".math").count() == 3, "amounts of money are no formulas"
        assert message.locator("table td").all_inner_texts() == ["one", "2"]
        assert message.locator("ol > li > ul > li strong").inner_text() == "bold"
        assert message.locator("a").evaluate_all("all => all.map((one) => one.href)") == [
            "https://example.org/a",
            "https://example.org/x.png",
        ]
        with page.expect_download() as found:
            message.get_by_role("button", name="Save").click()
        assert found.value.suggested_filename == "code.py"
        assert found.value.path().read_text().startswith("def add(a: int)")
        menu(page, message, "Show as it was written")
        expect(message.locator(".written")).to_have_text(TEXT)
        menu(page, message, "Show as Markdown")
        expect(message.locator(".katex").first).to_be_attached()
        expect(message.locator(".thoughts-text")).to_be_hidden()
        message.get_by_text("Thoughts").click()
        expect(message.locator(".thoughts-text")).to_have_text("first think")
        expect(answers(page).last.locator(".call")).to_contain_text("Calls weather")
        expect(page.get_by_label("Result of weather")).to_be_visible()
        assert findings(page) == []


def test_what_an_answer_and_a_key_draw_is_counted(visit: Visit, inspected: Served, tmp_path: Path) -> None:
    """A growing text makes elements of what is new in it, and a key those around the field: neither
    depends on what stands there already."""
    grows = """async () => {
        const { Markdown } = await import("/inspector/views/chat/markdown.js");
        const { el, fill, icon } = await import("/inspector/lib/dom.js");
        const { textNodes, visible } = await import("/inspector/lib/text.js");
        await import("/inspector/lib/vendor.js").then(({ script }) => script("markdown-it.min.js"));
        const markdown = new Markdown({ el, fill, icon, textNodes, visible });
        markdown.show("x");
        await new Promise((done) => setTimeout(done));
        const make = document.createElement.bind(document);
        let count = 0, text = "";
        document.createElement = (...given) => (count += 1, make(...given));
        const block = "A *sentence* of `some` words.\\n\\n- one\\n- two\\n\\n```\\ncode\\n```\\n\\n";
        const grow = () => { count = 0; for (const piece of block.repeat(20).match(/.{1,4}/gs)) markdown.show((text += piece)); return count; };
        try { return [grow(), grow(), grow()]; } finally { document.createElement = make; }
    }"""
    watching = """() => { window.drawn = []; new MutationObserver((all) => { for (const one of all)
        if (!one.target.parentElement?.closest(".ask-form, .statusbar, .sr-only")) drawn.push(one.target.className ?? one.target.nodeName); })
        .observe(document.body, { subtree: true, childList: true, characterData: true, attributes: true }); }"""
    quiet = """() => new Promise((done) => { let last = setTimeout(done, 700);
        new MutationObserver(() => { clearTimeout(last); last = setTimeout(done, 700); })
            .observe(document.body, { subtree: true, childList: true, characterData: true, attributes: true }); })"""
    with talking(visit, inspected.url) as (page, _):
        first, second, third = page.evaluate(grows)
        assert first > 100
        assert max(second, third) <= 1.1 * first, "as many as before, though more stands there"
        said = [{"role": ("user", "assistant")[at % 2], "content": TEXT} for at in range(60)]
        bring(page, tmp_path, said)
        expect(page.locator("article")).to_have_count(60)
        page.evaluate(quiet)  # the list of chats has been drawn, too
        field(page).focus()
        page.evaluate(watching)
        page.keyboard.type("typed behind sixty messages")
        expect(field(page)).to_have_value("typed behind sixty messages")
        assert page.evaluate("drawn") == []


def test_the_first_paint_waits_for_no_script(browser: Browser, inspected: Served) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.route("**/*.js", lambda route: route.abort())
    page.goto(inspected.url)
    expect(page.get_by_text("Loading")).to_be_visible()
    painted = "performance.getEntriesByName('first-contentful-paint').length"
    wait_for(lambda: page.evaluate(painted) == 1)
    context.close()


def test_what_the_chat_imports_is_named_in_the_page(visit: Visit, inspected: Served) -> None:
    """So the browser asks for all of it at once."""
    text = Path(quire_inspector.__file__).with_name("page").joinpath("index.html").read_text()
    named = set(re.findall(r'"modulepreload" href="([^"]+)"', text))
    with talking(visit, inspected.url) as (_, watch):
        asked = {one.removeprefix("GET /") for one in watch.requests if one.endswith(".js")}
        assert asked - {"inspector/main.js", "inspector/theme.js"} == named


def test_right_to_left(visit: Visit, inspected: Served, tmp_path: Path) -> None:
    with talking(visit, inspected.url) as (page, _):
        bring(
            page,
            tmp_path,
            [
                {"role": "user", "content": "مرحبا"},
                {"role": "assistant", "content": "السلام\n\nhello\n\n- **أولا**\n- two\n\nمی\u200cخواهم"},
            ],
        )
        shown = answers(page).first.locator(".markdown > p")
        expect(shown).to_have_count(3)
        assert [one.evaluate("one => getComputedStyle(one).direction") for one in shown.all()] == ["rtl", "ltr", "rtl"]
        assert page.locator(".messages .ctl").count() == 0, "a non-joiner is how Persian is spelled"
        (listed,) = answers(page).first.locator(".markdown > ul").all()
        assert listed.evaluate("one => getComputedStyle(one).direction") == "rtl", "its dots stand on the right"


@pytest.mark.parametrize("width", [360, *(pytest.param(wide, marks=pytest.mark.slow) for wide in (768, 2560))])
def test_small_and_large_screens(width: int, visit: Visit, inspected: Served, tmp_path: Path) -> None:
    with talking(visit, inspected.url, viewport={"width": width, "height": 740}) as (page, _):
        bring(page, tmp_path, [{"role": "user", "content": "w" * 400}, {"role": "assistant", "content": TEXT}])
        expect(answers(page).first.locator(".katex").first).to_be_attached()
        assert sideways(page) == []
        last, pill = page.get_by_role("link", name="Playground").bounding_box(), page.locator(".pill").bounding_box()
        assert last is not None
        assert pill is not None
        assert last["x"] + last["width"] <= (pill["x"] if width > 760 else width), "tabs end before the tools"
        for name in ("Branches", "Settings", "Conversations"):
            page.locator(".chat-head").get_by_role("button", name=name, exact=True).click(force=width > 999)
            page.wait_for_timeout(100)
            assert sideways(page) == []
            assert findings(page) == []
            page.keyboard.press("Escape")


LLAMA = [
    {
        "conv": {"id": "c", "name": "of llama.cpp", "lastModified": 1, "currNode": "b1"},
        "messages": [
            {"id": "r", "type": "root", "role": "system", "content": "", "parent": None, "children": ["q"]},
            {
                "id": "q",
                "type": "text",
                "role": "user",
                "content": "why?",
                "parent": "r",
                "children": ["a1", "b1"],
                "extra": [{"type": "TEXT", "name": "n.txt", "content": "notes"}],
            },
            {"id": "a1", "type": "text", "role": "assistant", "content": "so", "parent": "q", "children": []},
            {
                "id": "b1",
                "type": "text",
                "role": "assistant",
                "content": "thus",
                "thinking": "hm",
                "parent": "q",
                "children": [],
            },
        ],
    }
]
WEBUI = [
    {
        "title": "of Open WebUI",
        "chat": {
            "history": {
                "currentId": "b1",
                "messages": {
                    "q": {"id": "q", "parentId": None, "role": "user", "content": "why?"},
                    "a1": {"id": "a1", "parentId": "q", "role": "assistant", "content": "so"},
                    "b1": {
                        "id": "b1",
                        "parentId": "q",
                        "role": "assistant",
                        "content": '<details type="reasoning" done="true">\n<summary>Thought</summary>\n> hm\n'
                        "</details>\nthus",
                    },
                },
            }
        },
    }
]
GPT = [
    {
        "title": "of ChatGPT",
        "current_node": "b1",
        "mapping": {
            "r": {"id": "r", "message": None, "parent": None, "children": ["s"]},
            "s": {"id": "s", "message": {"author": {"role": "system"}, "content": {"parts": [""]}}, "parent": "r"},
            "q": {"message": {"author": {"role": "user"}, "content": {"parts": ["why?"]}}, "parent": "s"},
            "t": {"message": {"author": {"role": "tool"}, "content": {"parts": ["secret"]}}, "parent": "q"},
            "a1": {"message": {"author": {"role": "assistant"}, "content": {"parts": ["so"]}}, "parent": "q"},
            "b1": {"message": {"author": {"role": "assistant"}, "content": {"parts": ["thus"]}}, "parent": "t"},
        },
    }
]


def test_exports_of_other_pages_keep_their_branches(visit: Visit, inspected: Served, tmp_path: Path) -> None:
    with talking(visit, inspected.url) as (page, _):
        for exported, title in ((LLAMA, "of llama.cpp"), (WEBUI, "of Open WebUI"), (GPT, "of ChatGPT")):
            bring(page, tmp_path, exported)
            expect(page.locator(".chat-title")).to_contain_text(title)
            expect(questions(page).locator(".markdown")).to_have_text("why?")
            expect(answers(page).locator(".markdown")).to_have_text("thus")
            expect(answers(page).locator(".sibling-count")).to_have_text("2/2")
            assert page.locator(".thoughts:not([hidden])").count() == (title != "of ChatGPT")
        bring(page, tmp_path, LLAMA + LLAMA)
        expect(page.locator("#toasts")).to_contain_text("2 conversations were imported")
        # Open WebUI 0.11 writes all conversations as lines.
        (tmp_path / "lines.json").write_text("".join(f"{json.dumps(one)}\n" for one in WEBUI * 3))
        page.locator("input[accept]").set_input_files(tmp_path / "lines.json")
        expect(page.locator("#toasts")).to_contain_text("3 conversations were imported")
        wait_for(lambda: len(told(inspected.client, "/v1/chats")["data"]) >= 5)
        for one in told(inspected.client, "/v1/chats")["data"]:
            inspected.client.delete(f"/v1/chats/{one['id']}")


def test_a_conversation_on_a_phone(visit: Visit, inspected: Served) -> None:
    """With a thumb: ask, edit, go between branches, another branch in the tree, a new chat."""
    phone = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}
    with talking(visit, inspected.url, **phone) as (page, _):
        field(page).tap()
        page.keyboard.type("first line")
        page.keyboard.press("Enter")
        page.keyboard.type("second line")
        expect(field(page)).to_have_value("first line\nsecond line")
        page.get_by_role("button", name="Send", exact=True).tap()
        expect(answers(page)).to_have_count(1)
        settled(page)
        questions(page).first.get_by_role("button", name="Edit").tap()
        page.get_by_label("The message").fill("other")
        page.get_by_role("button", name="Branch and answer").tap()
        settled(page)
        page.get_by_role("button", name="Earlier branch").tap()
        expect(questions(page).first).to_contain_text("second line")
        page.get_by_role("button", name="Branches", exact=True).tap()
        assert findings(page) == []
        page.get_by_role("treeitem", name="You: other").tap()
        expect(page.locator(".chat-panel")).to_be_hidden()
        expect(questions(page).first).to_contain_text("other")
        assert sideways(page) == []
        page.get_by_role("button", name="Conversations", exact=True).tap()
        page.get_by_role("button", name="New chat").tap()
        expect(page.get_by_text("What shall we talk about?")).to_be_visible()
    close_all(inspected.client)


def test_exports_can_be_imported(visit: Visit, inspected: Served, tmp_path: Path) -> None:
    def saved(page: Page, item: str) -> Path:
        with page.expect_download() as found:
            page.get_by_role("button", name="Export and more").click()
            page.get_by_role("dialog").get_by_role("button", name=item).click()
        path = tmp_path / found.value.suggested_filename
        found.value.save_as(path)
        return path

    with talking(visit, inspected.url) as (page, _):
        ask(page, "one")
        ask(page, "two")
        answers(page).last.focus()
        page.keyboard.press("r")
        settled(page)
        shown = page.locator(".messages .markdown").all_inner_texts()
        assert saved(page, "Branch as Markdown").read_text().startswith("# one\n\n## You\n\none\n")
        files = [saved(page, item) for item in ("Branch as messages", "All branches")]
        state = saved(page, "Branch as a state file")
        assert [one["role"] for one in json.loads(files[0].read_text())["messages"]] == ["user", "assistant"] * 2
        for file, count in zip(files, (0, 1), strict=True):
            page.locator("input[accept]").set_input_files(file)
            expect(page.locator(".sibling-count")).to_have_count(count)
            expect(page.locator(".messages .markdown")).to_have_text(shown)
        before = page.url
        page.locator("input[accept]").set_input_files(state)
        expect(page.get_by_role("button", name="More about")).to_have_count(4)
        expect(page).not_to_have_url(before)  # the conversation before looks the same
        expect(answers(page)).to_have_count(2)
        expect(page.locator(".messages .markdown")).to_have_text(shown)
        ask(page, "and on")
        # The template writes the answers anew, perhaps in other tokens than the model wrote. All
        # before the first answer has the same tokens.
        first = {"messages": [{"role": "user", "content": "one"}], "add_generation_prompt": True}
        opening = inspected.client.post("/tokenize", json=first).json()["count"]
        assert figure(answers(page).last, "reused") >= opening > 1, "the state of the file"
    close_all(inspected.client)


# -- sessions --------------------------------------------------------------------------------------


def test_commit_pin_name_and_look(visit: Visit, chat_folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"state_dir": tmp_path / "state"}
    with (
        engine(chat_folder, **options) as llm,
        serving(llm, ServerSettings(allow_edits=True)) as served,
        talking(visit, served.url) as (page, watch),
    ):
        watch.allow("404")
        ask(page, "remember this")
        menu(page, answers(page).last, "Name the branch")
        page.get_by_role("dialog").get_by_label("Name").fill("<b>mine</b>")
        page.keyboard.press("Enter")
        expect(answers(page).last.locator(".tag")).to_have_text("<b>mine</b>")
        menu(page, answers(page).last, "Pin its state")
        expect(answers(page).last).to_contain_text("pinned")
        assert sum(one["pinned"] for one in told(served.client, "/v1/sessions")["data"]) == 1
        menu(page, answers(page).last, "Unpin")
        wait_for(lambda: not any(one["pinned"] for one in told(served.client, "/v1/sessions")["data"]))
        menu(page, answers(page).last, "Commit")
        page.get_by_role("dialog").get_by_label("Branch of the store").fill("kept")
        page.keyboard.press("Enter")
        expect(answers(page).last).to_contain_text("kept")
        assert [one["name"] for one in told(served.client, "/v1/branches")["data"]] == ["kept"]
        close_all(served.client)
        ask(page, "go on from the commit")
        assert any(one["last_commit"] for one in told(served.client, "/v1/sessions")["data"])
        close_all(served.client)
        answers(page).first.focus()
        page.keyboard.press("b")
        ask(page, "back at the commit")
        expect(questions(page).last.locator(".sibling-count")).to_have_text("2/2")
        assert any(one["last_commit"] for one in told(served.client, "/v1/sessions")["data"])
        answers(page).last.locator(".why-row").click()
        answers(page).last.get_by_role("button", name="Chances and attention").click()
        page.wait_for_selector(".view-token")
        expect(page.locator(".view-token")).to_contain_text("rank", ignore_case=True)
