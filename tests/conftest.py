# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Settings of every test process, made before TensorFlow is imported."""

import os

import hypothesis
import pytest

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")

# Where there is a GPU, several test processes share it.
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")

# Test processes that each take every core slow each other down.
_PROCESSES = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_THREADS = str(max(1, (os.cpu_count() or 1) // _PROCESSES))
for _variable in ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(_variable, _THREADS)

# The same examples in every run, and no verdict that depends on the clock: the
# first example of a property traces a graph, the others do not.
hypothesis.settings.register_profile("dice_tf", deadline=None, derandomize=True)
hypothesis.settings.load_profile("dice_tf")

# What `make test` leaves out, and `make test-all` runs: kills and several processes, whole
# programs of the pages, searches, and the largest models. Files, or single tests of others.
LONG = {
    "ablation_test.py",
    "accounting_selection_test.py",
    "audit_privacy_test.py",
    "benchmarks_test.py",
    "bias_corrected_adam_test.py",
    "cases2_first_check_test.py",
    "choosing_the_clip_docs_test.py",
    "clipping_bias_test.py",
    "compare_test.py",
    "counterexample_test.py",
    "custom_training_loop_test.py",
    "distribution_test.py",
    "finetune_text_test.py",
    "gradient_norms_test.py",
    "image_models_test.py",
    "killed_workers_test.py",
    "migrating_docs_test.py",
    "multi_gpu_test.py",
    "multi_worker_test.py",
    "owners_audit_test.py",
    "owners_test.py",
    "per_layer_rules_test.py",
    "precision_test.py",
    "private_search_docs_test.py",
    "private_search_test.py",
    "replicas_benchmark_test.py",
    "resume_test.py",
    "tables_docs_test.py",
    "train_image_classifier_test.py",
    "train_table_test.py",
    "units_docs_test.py",
    "workflow_callbacks_test.py",
    "workflow_finetune_applications_test.py",
    "workflow_gan_test.py",
    "workflow_image_folder_test.py",
    "workflow_lora_text_test.py",
    "workflow_masked_lstm_test.py",
    "workflow_privacy_officer_test.py",
    "workflow_table_test.py",
    "test_a2_a_search_without_the_callback_says_what_is_unaccounted",
    "test_a_tuner_may_build_many_models_in_one_process",
    "test_a_table_of_what_the_theorem_says",
    "test_an_output_without_weights_has_weight_1",
    "test_b1_fix_model_rebuilds_every_family_of_keras_applications",
    "test_b4_every_trial_of_a_search_has_its_epsilon",
    "test_b6_ctc_takes_masked_inputs",
    "test_c1_a_memmap_needs_no_more_memory_than_a_source_of_rows",
    "test_calibrated_noise_lets_all_steps_be_made",
    "test_case_18_chunks_change_nothing_to_rounding_errors_included",
    "test_case_4_files_of_every_class_load_in_a_fresh_process",
    "test_command_line",
    "test_d1_the_part_of_one_example_in_the_sums",
    "test_equals_a_loop_over_examples_in_the_same_policy",
    "test_feedback_is_chosen_by_steps_data_and_noise",
    "test_models_trained_in_threads_do_not_meet",
    "test_the_code_runs_from_top_to_bottom",
    "test_thresholds_hold_to_the_precision_of_float32",
    "test_without_clipping_and_noise_equals_the_original_over_20_steps",
}


def pytest_collection_modifyitems(items):
    """Marks long tests."""
    for item in items:
        if {item.path.name, item.originalname} & LONG:
            item.add_marker(pytest.mark.long)
