"""Faults of models that ranks divide."""

from tests.mutants.harness import Mutant

DIVISION = "ranks/test_division.py"
RANKS = "ranks/test_ranks.py"

MUTANTS = (
    Mutant(
        name="ranks-add-a-bias-each",
        file="weights/places.py",
        old="return weights if self.share.rank == 0 else torch.zeros_like(weights)",
        new="return weights",
        tests=(f"{DIVISION}::test_two_ranks_give_the_logits_of_one[llama-biases]",),
    ),
    Mutant(
        name="ranks-cut-fused-rows-as-one-part",
        file="weights/places.py",
        old="several = axis == rows and self.parts",
        new="several = False",
        tests=(f"{DIVISION}::test_two_ranks_give_the_logits_of_one[phi3]",),
    ),
    Mutant(
        name="ranks-that-share-a-kv-head-take-the-first",
        file="weights/places.py",
        old="self.share.rank * (part // kept) // self.share.size * kept",
        new="self.share.rank % (part // kept) * kept",
        tests=(f"{DIVISION}::test_more_ranks_than_kv_heads[llama-gqa]",),
    ),
    Mutant(
        name="ranks-gather-the-padding-of-the-head",
        file="models/division.py",
        old="start = min(each * share.rank, len(weight_VE))",
        new="start = min(each * share.rank, len(weight_VE) - each)",
        tests=(f"{DIVISION}::test_two_ranks_give_the_logits_of_one[llama-gqa]",),
    ),
    Mutant(
        name="ranks-replay-no-edits",
        file="runner/ranks.py",
        old="                runner.execute(message)\n",
        new="                runner.execute(message) if message.chunks else None\n",
        tests=(f"{RANKS}::test_sessions_fork_rewind_and_edit",),
    ),
    Mutant(
        name="ranks-outlive-their-engine",
        file="llm.py",
        old="        if self._parts.ranks is not None:\n            self._parts.ranks.close()\n",
        new="",
        tests=(f"{RANKS}::test_ranks_end_with_their_engine",),
    ),
    Mutant(
        name="ranks-break-on-every-failure",
        file="runner/ranks.py",
        old="if all(pipe.poll(ANSWER_SECONDS) and pipe.recv() == FAILED for pipe in self._pipes):",
        new="if all(pipe.poll(ANSWER_SECONDS) and pipe.recv() is None for pipe in self._pipes):",
        tests=(f"{RANKS}::test_a_step_that_fails_on_all_ranks_is_undone",),
    ),
)
