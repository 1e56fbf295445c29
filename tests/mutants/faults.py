"""All mutants."""

from tests.mutants import (
    faults_adapters,
    faults_blending,
    faults_bridge,
    faults_commands,
    faults_executor,
    faults_hints,
    faults_history,
    faults_hostile,
    faults_kv,
    faults_models,
    faults_outside,
    faults_resume,
    faults_reuse,
    faults_serving,
    faults_stored,
    faults_tiers,
)

MUTANTS = (
    *faults_kv.MUTANTS,
    *faults_models.MUTANTS,
    *faults_serving.MUTANTS,
    *faults_stored.MUTANTS,
    *faults_adapters.MUTANTS,
    *faults_executor.MUTANTS,
    *faults_bridge.MUTANTS,
    *faults_commands.MUTANTS,
    *faults_outside.MUTANTS,
    *faults_hints.MUTANTS,
    *faults_history.MUTANTS,
    *faults_hostile.MUTANTS,
    *faults_reuse.MUTANTS,
    *faults_tiers.MUTANTS,
    *faults_resume.MUTANTS,
    *faults_blending.MUTANTS,
)
