"""Faults of models that ranks divide."""

from tests.mutants.harness import Mutant

DIVISION = "ranks/test_division.py"
BLOCKS = "ranks/test_divided_blocks.py"
ADAPTERS = "ranks/test_divided_adapters.py"
RANKS = "ranks/test_ranks.py"
ROWS = "ranks/test_divided_rows.py"
STAGES = "ranks/test_stages.py"
BATCHES = "ranks/test_micro_batches.py"
SLICES = "ranks/test_slices.py"
HANDOVER = "ranks/test_divided_handover.py"

MUTANTS = (
    Mutant(
        name="a-rank-without-the-bias-of-its-head",
        file="models/division.py",
        old="own = None if bias_V is None else bias_V.narrow(0, start, rows)",
        new="own = None",
        tests=("ranks/test_division.py::test_experts_are_divided[phimoe]",),
    ),
    Mutant(
        name="ranks-with-other-frequencies",
        file="rank_process.py",
        old="max_model_len=config.max_model_len",
        new="max_model_len=None",
        tests=(f"{SLICES}::test_all_ranks_take_the_factors_of_the_longest_sequence",),
    ),
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
        old="several = sum(self.parts) == own",
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
        old="            for piece in range(wide // size)\n",
        new="            for piece in range(self.grid.slices)\n",
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
        old="        self.storage.put(layer_id, slots, self.division.put(seq_id, layer_id, place, slots, planes, own, whole))\n",
        new="        self.division.put(seq_id, layer_id, place, slots, planes, own, whole)\n",
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
        name="slices-norm-the-channels-that-are-here",
        file="models/division.py",
        old="        self.group.sum(sums_TG)\n",
        new="        sums_TG.mul_(self.group.size)\n",
        tests=(f"{DIVISION}::test_recurrent_layers[mamba2-biases-tied]",),
    ),
    Mutant(
        name="slices-norm-a-group-by-all-channels",
        file="models/division.py",
        old="self.group.rank * self.groups // self.group.size",
        new="0",
        tests=(f"{DIVISION}::test_more_ranks_than_groups_of_heads[mamba2]",),
    ),
    Mutant(
        name="slices-count-shared-keys-twice",
        file="models/division.py",
        old="k_TC.square().sum(-1) / self.copies",
        new="k_TC.square().sum(-1)",
        tests=(f"{DIVISION}::test_more_ranks_than_kv_heads[olmo2]",),
    ),
    Mutant(
        name="slices-cut-off-by-the-gates-that-are-here",
        file="models/division.py",
        old="group.sum(torch.stack((wide_TF.sum(-1), wide_TF.square().sum(-1)), -1))",
        new="(torch.stack((wide_TF.sum(-1), wide_TF.square().sum(-1)), -1) * group.size)",
        tests=(f"{SLICES}::test_logits_of_layers_that_share_rows[3n]",),
    ),
    Mutant(
        name="slices-add-what-is-normed-each",
        file="models/division.py",
        old="        part.dense = Summed(part.dense, group)\n",
        new="",
        tests=(f"{SLICES}::test_conversations[gemma4-moe]",),
    ),
    Mutant(
        name="slices-keep-the-kernels-norm",
        file="models/division.py",
        old="mixer.norm.joint_scale, mixer.call = SummedScale(mixer.norm.eps, whole.norm_groups, group), None",
        new="mixer.norm.joint_scale = SummedScale(mixer.norm.eps, whole.norm_groups, group)",
        tests=(f"{SLICES}::test_logits_of_mixers[granite-4-rope]",),
    ),
    Mutant(
        name="slices-name-the-first-heads-norms",
        file="models/tensor_names.py",
        old="norms.{first + head}.weight",
        new="norms.{head}.weight",
        tests=(f"{DIVISION}::test_two_ranks_give_the_logits_of_one[stablelm-head-norms]",),
    ),
    Mutant(
        name="slices-cut-convolved-channels-as-one-part",
        file="nn/delta.py",
        old="conv_state(self.taps, self.convolved, dtype)",
        new="conv_state(self.taps, (self.channels,), dtype)",
        tests=(f"{SLICES}::test_files_of_slices_are_those_of_one_process[qwen3-next]",),
    ),
    Mutant(
        name="slices-write-a-state-of-all-heads",
        file="kv/recurrent.py",
        old="data = self.division.part_of(slice, data[None], own, whole)[0]",
        new="data = self.division.part_of(0, data[None], own, whole)[0]",
        tests=(f"{SLICES}::test_layers_of_all_slices_are_read_and_written[mamba2]",),
    ),
    Mutant(
        name="micro-batches-want-logits-of-each-piece",
        file="runner/micro_batches.py",
        old='"none" if chunk.logits == "last" and stop < len(chunk.tokens) else chunk.logits',
        new="chunk.logits",
        tests=(f"{BATCHES}::test_a_prompt_beside_decodes_is_cut_evenly",),
    ),
    Mutant(
        name="ranks-lose-rows-of-a-hand-over",
        file="runner/ranks.py",
        old="if seq in state.parts.imports or seq in state.parts.transfers:",
        new="if seq in state.parts.imports:",
        tests=(f"{HANDOVER}::test_prompts_go_between_layouts[1x1 to 2x1-qwen3-next]",),
    ),
    Mutant(
        name="ranks-keep-pages-of-a-cancelled-hand-over",
        file="kv/transfer_verbs.py",
        old="""    with contextlib.suppress(RanksBroken):
        _let_follow(state, HandOver("forget", seq_id))
""",
        new="",
        tests=(f"{HANDOVER}::test_a_hand_over_that_ends_leaves_no_page",),
    ),
    Mutant(
        name="rows-of-a-step-are-sent-twice",
        file="kv/send_mark.py",
        old="""        self._gone = self.sent
        self._finish_if_all()

    def _finish_if_all""",
        new="""        self._finish_if_all()

    def _finish_if_all""",
        tests=(f"{HANDOVER}::test_rows_are_sent_once",),
    ),
    Mutant(
        name="rows-that-the-first-stage-leaves-out",
        file="runner/ranks.py",
        old="left_out=parts[-1].left_out",
        new="left_out=parts[0].left_out",
        tests=("ranks/test_staged_engine.py::test_any_stage_chooses_rows",),
    ),
    Mutant(
        name="questions-seen-by-one-stage",
        file="runner/local.py",
        old="rehearsal.mass_T.copy_(line.sum(rehearsal.mass_T))",
        new="line.sum(rehearsal.mass_T)",
        tests=("ranks/test_staged_engine.py::test_any_stage_chooses_rows",),
    ),
    Mutant(
        name="only-rank-0-refuses-to-pop-what-was-sent",
        file="kv/transfer_verbs.py",
        old='    _let_follow(state, HandOver("send", seq_id, begin, end))\n',
        new="",
        tests=(f"{HANDOVER}::test_all_ranks_refuse_alike",),
    ),
)
