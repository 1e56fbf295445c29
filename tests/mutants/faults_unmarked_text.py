"""Faults of chunks of text without marks."""

from tests.mutants.harness import Mutant

CUTS = "blend/test_unmarked_text.py::"
ENGINE = "blend/test_unmarked_prompts.py::"

MUTANTS = (
    Mutant(
        name="long-texts-are-cut-at-a-length",
        file="blend/unmarked_text.py",
        old="count = SHORTEST + int(hashes.argmin())",
        new="count = LONGEST",
        tests=(CUTS + "test_lengths", CUTS + "test_places_do_not_depend_on_what_stands_before"),
    ),
    Mutant(
        name="every-order-gives-chunks",
        file="blend/unmarked_text.py",
        old="2 * new < slots.size",
        new="not slots.size",
        tests=(ENGINE + "test_new_orders_add_nothing",),
    ),
    Mutant(
        name="chunks-that-were-given-up-never-come-back",
        file="blend/unmarked_text.py",
        old="if key not in self._keys and 2 * new",
        new="if 2 * new",
        tests=(CUTS + "test_what_is_seen_is_not_kept_again",),
    ),
    Mutant(
        name="texts-of-other-salts-count",
        file="blend/unmarked_text.py",
        old='int.from_bytes(key.parent[:4], "little")',
        new="0",
        tests=(CUTS + "test_salts_have_texts_of_their_own",),
    ),
    Mutant(
        name="questions-of-one-piece-are-kept",
        file="engine/blending.py",
        old="end = blend.question if pieces.offsets else blend.length - ASKING",
        new="end = blend.length",
        tests=(ENGINE + "test_marks_and_questions_keep_their_bounds", ENGINE + "test_new_orders_add_nothing"),
    ),
    Mutant(
        name="covered-text-is-cut-again",
        file="engine/blending.py",
        old="taken = [*pieces.marked, *((one.start, one.stop) for one in known), *",
        new="taken = [*pieces.marked, *",
        tests=(ENGINE + "test_what_is_covered_is_not_cut",),
    ),
    Mutant(
        name="exact-prefixes-are-cut",
        file="engine/blending.py",
        old="begin = max(cached, ",
        new="begin = max(0, ",
        tests=(ENGINE + "test_exact_prefixes_are_not_cut",),
    ),
)
