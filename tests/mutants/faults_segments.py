"""Faults of segments in chats, and of blending over HTTP."""

from tests.mutants.harness import Mutant

CHATS = "text/test_chat_segments.py::"
SERVER = "server/test_blending.py::"

MUTANTS = (
    Mutant(
        name="a-changed-text-is-cut-out-as-it-was",
        file="text/chat_segments.py",
        old="            return number\n",
        new="            content = contents[number]\n",
        tests=(CHATS + "test_whatever_is_cut_is_the_prompt",),
    ),
    Mutant(
        name="texts-that-a-template-strips-have-no-place",
        file="text/chat_segments.py",
        old="(given, given.lstrip(), given.rstrip(), given.strip())",
        new="(given,)",
        tests=(CHATS + "test_whatever_is_cut_is_the_prompt",),
    ),
    Mutant(
        name="what-stands-behind-the-last-sign-is-not-compared",
        file="text/chat_segments.py",
        old="or [text] if at == len(text) else number",
        new="or [text]",
        tests=(CHATS + "test_texts_that_a_template_changes",),
    ),
    Mutant(
        name="templates-see-marks-of-segments",
        file="text/chat_segments.py",
        old='if name != "segment"}',
        new="if name}",
        tests=(CHATS + "test_templates_see_no_marks",),
    ),
    Mutant(
        name="segments-of-a-body-are-tokenised-together",
        file="server/openai/generation.py",
        old="return cls(whole, pieces if any(isinstance(part, Segment) for part in parts) else whole)",
        new="return cls(whole, whole)",
        tests=(SERVER + "test_pieces_are_tokenised_by_themselves",),
    ),
    Mutant(
        name="every-part-begins-a-prompt",
        file="server/openai/generation.py",
        old="encoded(content, not number)",
        new="encoded(content, True)",
        tests=(SERVER + "test_pieces_are_tokenised_by_themselves",),
    ),
    Mutant(
        name="warm-without-the-keys-salt",
        file="server/openai/warm_routes.py",
        old="salt = context.salt(request.state.owner, body.cache_salt)",
        new="salt = body.cache_salt",
        tests=(SERVER + "test_keys_see_their_own",),
    ),
    Mutant(
        name="pins-count-tokens-of-a-prompt-that-is-not-cut",
        file="server/openai/chat.py",
        old="first_of(parts, count), chat",
        new="[text[:count]] if count < len(text) else parts, chat",
        tests=(SERVER + "test_marks_of_both_kinds",),
    ),
    Mutant(
        name="paths-in-the-reason",
        file="engine/blending.py",
        old='blend.reason = "cached rows did not come; the log says why"',
        new="blend.reason = str(error)",
        tests=(SERVER + "test_rows_that_do_not_come",),
    ),
)
