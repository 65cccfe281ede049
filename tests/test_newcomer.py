"""What a newcomer tried that did not work, row by row, and the tests in which each works or is
refused in one line with the way out.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent

TABLE: dict[str, list[str]] = {
    "a lazy Dataset with random augmentation": [
        "training/test_lazy.py::test_augmentation_is_drawn_afresh_and_the_same_by_any_number_of_workers"
    ],
    "DataLoader": ["training/test_lazy.py::test_a_loader_says_in_one_line_what_the_plan_replaces"],
    "dict items, nested tuples": [
        "training/test_batches.py::test_a_nested_batch_releases_the_bits_of_a_flat_one"
    ],
    "variable length, padded": [
        "training/test_lazy.py::test_records_of_several_lengths_are_padded_and_a_resumed_run_goes_on_with_other_lengths"
    ],
    "variable length, packed": [
        "training/test_packed.py::test_packed_sequences_train",
        "training/test_packed.py::test_lengths_of_the_callers_collate_and_a_resumed_run",
        "training/test_packed.py::test_lengths_of_others_are_refused",
    ],
    "Hugging Face datasets": [
        "training/test_lazy.py::test_a_hugging_face_dataset_gives_dicts_of_tensors"
    ],
    "a stream of records": [
        "training/test_lazy.py::test_what_cannot_be_trained_on_is_refused_in_one_line_and_costs_nothing"
    ],
    "Hugging Face Trainer": [
        "integrations/test_hugging_face.py::test_trainer_equals_level_two_bit_for_bit"
    ],
    "Lightning": [
        "integrations/test_lightning.py::test_lightning_equals_level_two_bit_for_bit",
        "integrations/test_lightning.py::test_a_fetcher_that_reads_ahead_does_no_harm",
    ],
    'reduction="none" forgotten': [
        "training/test_leaving.py::test_a_forgotten_reduction_costs_nothing"
    ],
    "LambdaLR, resumed after a crash": [
        "training/test_schedulers.py::test_a_run_that_was_cut_has_the_rates_and_weights_of_one_that_was_not",
        "training/test_schedulers.py::test_a_scheduler_whose_rates_did_not_move_yet_is_found_on_resume",
    ],
    "a scheduler stepped per physical batch": [
        "training/test_schedulers.py::test_the_boundary_is_where_a_logical_batch_ends"
    ],
    "frozen BatchNorm in eval mode": [
        "models/test_repair.py::test_frozen_statistics_are_kept_in_every_mode_and_the_card_says_whose_they_are"
    ],
    "repair of BatchNorm": [
        "models/test_repair.py::test_batch_normalisation_of_any_kind_becomes_group_normalisation"
    ],
    "fit with three fields a row": [
        "training/test_objective.py::test_batches_of_any_structure_train_and_are_measured_alike"
    ],
    "fit of a Hugging Face model with evaluation=": [
        "training/test_objective.py::test_a_hugging_face_model_is_trained_and_measured"
    ],
    'losses "mse", "bce"': [
        "training/test_objective.py::test_losses_by_name_are_what_their_names_say"
    ],
    'a recipe as plan, optimizer="adam", LBFGS, float or int32 labels': [
        "training/test_objective.py::test_bad_input_is_one_line_and_nothing_is_spent"
    ],
    "--records wrong by the holdout": [
        "training/test_leaving.py::test_a_number_of_records_that_forgets_the_holdout_costs_nothing",
        "cli/test_first_contact.py::test_the_explorers_command_works",
    ],
    "dpfy --version": ["cli/test_first_contact.py::test_version"],
    "dpfy train after a plain install": [
        "cli/test_first_contact.py::test_training_works_without_any_extra",
        "cli/test_first_contact.py::test_a_missing_package_is_one_line",
    ],
    "README snippet as printed": ["docs/test_blocks.py::test_quick_blocks_run_as_printed"],
    "--phases help": ["cli/test_first_contact.py::test_help_shows_brackets"],
    "a CSV of one's own": [
        "cli/test_init.py::test_from_a_table_to_a_verified_run",
        "cli/test_problems.py::test_a_file_with_many_mistakes_is_refused_once",
    ],
    "break out of the loop": [
        "training/test_leaving.py::test_a_run_left_after_a_step_stays_billed_and_goes_on"
    ],
    "finish() early": ["training/test_stopping.py::test_leaving_a_run_that_may_end_says_how"],
    "after training": [
        "training/test_load.py::test_a_model_of_the_command_line_comes_back_from_its_folder_alone",
        "cli/test_predict.py::test_a_table_is_predicted_by_the_schema_that_the_run_keeps",
        "cli/test_ledger.py::test_the_ledger_of_a_finished_run",
    ],
    "compiled model": ["training/test_load.py::test_wrapped_models_release_plain_names"],
    "LoRA": ["training/test_load.py::test_an_adapter_is_released_alone_with_its_base_on_the_card"],
    "packed LSTM": ["gradients/test_recurrent.py::test_every_parameter_is_explained"],
    "reentrant activation checkpointing": [
        "training/test_leaving.py::test_reentrant_checkpoints_are_refused_before_anything_is_released"
    ],
    "len(training.batches())": [
        "training/test_batches.py::test_the_length_is_the_steps_that_remain"
    ],
    'device="cuda" without CUDA': [
        "training/test_leaving.py::test_a_missing_gpu_is_said_to_be_missing"
    ],
    "dpfy train without torch": ["cli/test_first_contact.py::test_a_missing_package_is_one_line"],
    "report": [
        "training/test_leaving.py::test_the_card_says_what_it_is_about",
        "report/test_card.py::test_the_page_needs_nothing_else",
    ],
    "test metrics on a private holdout": [
        "training/test_evaluation.py::test_a_file_of_the_users_own_is_not_measured_unless_it_is_declared",
        "training/test_evaluation.py::test_a_billed_evaluation_is_part_of_the_guarantee",
    ],
}
"""What was tried, and the tests of it."""


@cache
def functions_of(file: Path) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef)
    }


@pytest.mark.parametrize("row", TABLE)
def test_each_row_has_its_tests(row: str) -> None:
    for place in TABLE[row]:
        file, _, name = place.partition("::")
        assert name in functions_of(ROOT / file), place
