"""Faults of models that ranks divide."""

from tests.mutants.harness import Mutant

DIVISION = "ranks/test_division.py"
BLOCKS = "ranks/test_divided_blocks.py"
ADAPTERS = "ranks/test_divided_adapters.py"
RANKS = "ranks/test_ranks.py"
ROWS = "ranks/test_divided_rows.py"
STAGES = "ranks/test_stages.py"
BATCHES = "ranks/test_micro_batches.py"

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
        old="output = runner.execute(message)",
        new="output = runner.execute(replace(message, edits=()))",
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
        file="runner/rank_processes.py",
        old="if all(self._answer(pipe, ANSWER_SECONDS) == FAILED for pipe in self._pipes):",
        new="if all(self._answer(pipe, ANSWER_SECONDS) is None for pipe in self._pipes):",
        tests=(f"{RANKS}::test_a_step_that_fails_on_all_ranks_is_undone",),
    ),
    Mutant(
        name="ranks-share-a-stored-head-in-turns",
        file="kv/divided_rows.py",
        old="return slice * pieces // self.grid.slices",
        new="return slice % pieces",
        tests=(f"{ROWS}::test_ranks_export_and_import_what_one_state_does[4-4-2-plain-torch.float32]",),
    ),
    Mutant(
        name="ranks-choose-rows-by-their-own-heads",
        file="runner/local.py",
        old="RowSources(state, None if group is None else group.sum)",
        new="RowSources(state)",
        tests=(f"{RANKS}::test_blended_prompts[v]",),
    ),
    Mutant(
        name="ranks-cut-blocks-as-numbers",
        file="weights/places.py",
        old="inner, outer = (-(-count // unit) * size for count in (inner, outer))",
        new="inner, outer = (count // size for count in (inner, outer))",
        tests=(f"{BLOCKS}::test_blocks_of_gguf_files[case0-2]",),
    ),
    Mutant(
        name="ranks-add-an-adapter-of-all-inputs",
        file="adapters/divided.py",
        old="a_RI=own.cut(update.a_RI).contiguous() if columns else update.a_RI,",
        new="a_RI=update.a_RI[:, : place.shape[1]].contiguous(),",
        tests=(f"{ADAPTERS}::test_ranks_give_the_logits_of_the_merged_model[llama-biases-2]",),
    ),
    Mutant(
        name="ranks-save-a-shared-head-twice",
        file="kv/divided_rows.py",
        old="return [first + piece * self.grid.slices // pieces for piece in range(pieces)]",
        new="return list(range(first, first + self.grid.slices))",
        tests=(f"{ROWS}::test_ranks_export_and_import_what_one_state_does[4-4-2-plain-torch.float32]",),
    ),
    Mutant(
        name="ranks-write-all-heads-of-a-write-alike",
        file="kv/stored_rows.py",
        old="            new_k, new_v = (state.division.heads_of(slice, new, heads) for new in (new_k, new_v))\n",
        new="            new_k, new_v = (new[:, :heads] for new in (new_k, new_v))\n",
        tests=(f"{ROWS}::test_overwritten_rows[2-4-2]",),
    ),
    Mutant(
        name="stages-lose-the-first-stages-states",
        file="kv/recurrent.py",
        old="        self.storage.put(self.layer(layer_id), slots, here)\n",
        new="",
        tests=(f"{STAGES}::test_files_of_stages_are_those_of_one_process[mamba2]",),
    ),
    Mutant(
        name="stages-read-the-first-stages-rows",
        file="kv/divided_rows.py",
        old="return self.owners.get(layer_id, 0) * self.grid.slices",
        new="return 0",
        tests=(f"{STAGES}::test_files_of_stages_are_those_of_one_process[gpt-oss]",),
    ),
    Mutant(
        name="stages-cut-between-a-block-and-its-source",
        file="models/stages.py",
        old="if not any(source < cut <= block for source, block in shared)",
        new="if cut",
        tests=(f"{STAGES}::test_blocks_that_share_k_and_v_are_in_one_stage",),
    ),
    Mutant(
        name="micro-batches-want-logits-of-each-piece",
        file="runner/micro_batches.py",
        old='"none" if chunk.logits == "last" and stop < len(chunk.tokens) else chunk.logits',
        new="chunk.logits",
        tests=(f"{BATCHES}::test_a_prompt_beside_decodes_is_cut_evenly",),
    ),
)
