"""Faults of calibrations of blending."""

from __future__ import annotations

from tests.mutants.harness import Mutant

NUMBERS, ENGINE = "blend/test_calibration.py", "blend/test_blend_calibration.py"

MUTANTS = (
    Mutant(
        name="check-layer-at-any-cost",
        file="blend/calibration.py",
        old="return max(0.0, removed) * (1 - one.cost)",
        new="return max(0.0, removed)",
        tests=(f"{NUMBERS}::TestCheckLayer::test_equals_its_definition",),
    ),
    Mutant(
        name="average-instead-of-worst-agreement",
        file="blend/calibration.py",
        old="worst_agreement=min(shares)",
        new="worst_agreement=fmean(shares)",
        tests=(f"{NUMBERS}::TestDeviation::test_of_many_probes",),
    ),
    Mutant(
        name="deviation-the-other-way-round",
        file="blend/calibration.py",
        old="(true.exp() * (true - ours))",
        new="(ours.exp() * (ours - true))",
        tests=(f"{NUMBERS}::TestDeviation::test_is_that_of_our_answers_from_the_true_ones",),
    ),
    Mutant(
        name="gate-open-where-divergence-is-no-number",
        file="blend/calibration.py",
        old="self.mean_kl <= limits.mean_kl\n",
        new="not self.mean_kl > limits.mean_kl\n",
        tests=(f"{NUMBERS}::TestCalibration::test_limits",),
    ),
    Mutant(
        name="gate-open-for-other-texts",
        file="blend/calibration.py",
        old="            and self.equal_texts >= limits.equal_texts\n",
        new="",
        tests=(f"{NUMBERS}::TestCalibration::test_limits",),
    ),
    Mutant(
        name="only-the-first-token-of-a-text-is-compared",
        file="blend/calibration.py",
        old="same[rows - 1 :]",
        new="same[rows - 1 : rows]",
        tests=(f"{NUMBERS}::TestDeviation::test_a_text_is_equal_if_each_of_its_tokens_is_the_most_likely_one",),
    ),
    Mutant(
        name="the-text-of-a-probe-has-no-end",
        file="sessions/blend_calibration.py",
        old=" and text[-1] not in engine.eos_ids",
        new="",
        tests=(f"{ENGINE}::test_the_text_of_a_probe_is_the_greedy_one",),
    ),
    Mutant(
        name="quality-of-a-higher-ratio",
        file="blend/calibration.py",
        old="[one for one in self.ratios if one.ratio <= ratio][-1]",
        new="[one for one in self.ratios if one.ratio >= min(ratio, 0.5)][0]",
        tests=(f"{NUMBERS}::TestCalibration::test_a_ratio_is_as_good_as_the_one_below_it",),
    ),
    Mutant(
        name="probes-keep-the-question-of-the-blended-forward-twice",
        file="sessions/blend_calibration.py",
        old="self._engine.runner.execute(Step(edits=(Pop(seq, length - probe.asks),)))",
        new="pass",
        tests=(f"{ENGINE}::test_probes_are_as_far_off_as_prompts",),
    ),
    Mutant(
        name="rows-of-the-lead-are-the-chunk",
        file="sessions/blend_calibration.py",
        old="export.plain_rows(one, len(lead), len(ids))",
        new="export.plain_rows(one, 0, len(ids) - len(lead))",
        tests=(f"{ENGINE}::test_probes_are_as_far_off_as_prompts",),
    ),
    Mutant(
        name="sequences-of-interrupted-probes-stay",
        file="sessions/blend_calibration.py",
        old="""    finally:
        with engine.lock:
""",
        new="""    except QuireError:
        raise
    else:
        with engine.lock:
""",
        tests=(f"{ENGINE}::test_an_interrupt",),
    ),
    Mutant(
        name="sequences-of-failed-probes-stay",
        file="sessions/blend_calibration.py",
        old="""                yield seq
            finally:
""",
        new="""                yield seq
            except KeyboardInterrupt:
                raise
            else:
""",
        tests=(f"{ENGINE}::test_a_forward_that_fails",),
    ),
    Mutant(
        name="a-calibration-of-any-model",
        file="sessions/blend_calibration.py",
        old="{VERSION}/{AUTO}/{blending.scope}",
        new="{VERSION}/{AUTO}",
        tests=(f"{ENGINE}::test_a_restart",),
    ),
    Mutant(
        name="the-check-layer-of-no-calibration",
        file="engine/blending.py",
        old="if self.calibration is None else self.calibration.layer",
        new="if True else 0",
        tests=(f"{ENGINE}::test_the_check_layer_is_that_of_the_calibration",),
    ),
    Mutant(
        name="no-gate",
        file="engine/blending.py",
        old="return reason or ratio",
        new="return ratio",
        tests=(f"{ENGINE}::test_the_gate",),
    ),
)
