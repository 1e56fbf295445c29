"""Faults of ``/v1/responses``: items, events, and what later responses go on from."""

from __future__ import annotations

from tests.mutants.harness import Mutant

RESPONSES = "server/test_responses.py"
ITEMS = "server/test_response_items.py"

MUTANTS = (
    Mutant(
        name="responses-of-other-keys",
        file="server/responses/store.py",
        old="if found is None or found.owner != owner:",
        new="if found is None:",
        tests=(f"{RESPONSES}::test_keys_see_their_own_and_the_oldest_go_first",),
    ),
    Mutant(
        name="items-of-other-keys",
        file="server/responses/store.py",
        old="if place is None or self._held[place].owner != owner:\n            return None\n        stored = await self.get(owner, place)",
        new="if place is None:\n            return None\n        stored = await self.get(self._held[place].owner, place)",
        tests=(f"{RESPONSES}::test_keys_see_their_own_and_the_oldest_go_first",),
    ),
    Mutant(
        name="responses-never-give-way",
        file="server/responses/store.py",
        old="            if left <= count and total <= size:",
        new="            if left <= count:",
        tests=(f"{RESPONSES}::test_keys_see_their_own_and_the_oldest_go_first",),
    ),
    Mutant(
        name="responses-kept-that-were-not-written",
        file="server/responses/store.py",
        old="        except NotDurable:\n            self._forget(name)\n",
        new="        except NotDurable:\n",
        tests=(f"{RESPONSES}::test_responses_outlive_the_server",),
    ),
    Mutant(
        name="salts-of-responses-not-inherited",
        file="server/responses/routes.py",
        old="salt = stored.salt if salt is None else salt",
        new="salt = body.cache_salt",
        tests=(f"{RESPONSES}::test_keys_see_their_own_and_the_oldest_go_first",),
    ),
    Mutant(
        name="calls-that-go-on-behind-the-text",
        file="server/responses/events.py",
        old='        yield from self._calls(call for call in calls if call["index"] == self._call)\n',
        new="",
        tests=(f"{ITEMS}::test_events_tell_what_the_deltas_say",),
    ),
    Mutant(
        name="thoughts-of-the-turn-before",
        file="server/responses/items.py",
        old='        return not message["content"] and "tool_calls" not in message',
        new="        return True",
        tests=(f"{ITEMS}::test_one_turn_of_a_model_is_one_message",),
    ),
    Mutant(
        name="cut-responses-said-to-be-complete",
        file="server/responses/events.py",
        old='return "incomplete" if cut or finish == "length" else "completed"',
        new='return "completed"',
        tests=(f"{RESPONSES}::test_an_answer_is_that_of_the_chat",),
    ),
)
