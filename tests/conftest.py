# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Settings of every test process, made before TensorFlow is imported."""

import json
import os
import re
import warnings

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

# What `make test` leaves out, and `make test-long` runs: kills and several processes, whole
# programs of the pages, searches, the largest models, and the cases that users and audits
# reported. Files, single tests of others, or single cases of those.
LONG = {
    "ablation_test.py",
    "accounting_allocation_test.py",
    "accounting_groups_test.py",
    "accounting_selection_runs_test.py",
    "accounting_selection_statements_test.py",
    "accounting_selection_test.py",
    "adaptive_accounting_test.py",
    "adaptive_clipping_docs_test.py",
    "audit_privacy_test.py",
    "auditing_test.py",
    "benchmarks_parts_test.py",
    "benchmarks_test.py",
    "bias_corrected_adam_test.py",
    "cases2_admission_test.py",
    "cases2_audit_test.py",
    "cases2_callbacks_test.py",
    "cases2_copies_test.py",
    "cases2_data_on_disk_test.py",
    "cases2_data_test.py",
    "cases2_first_check_test.py",
    "cases2_ledger_test.py",
    "cases2_loaded_noise_test.py",
    "cases2_losses_test.py",
    "cases2_mixing_test.py",
    "cases2_models_test.py",
    "cases2_norms_test.py",
    "cases2_saving_test.py",
    "cases2_unfreezing_test.py",
    "choosing_the_clip_docs_test.py",
    "clipping_bias_test.py",
    "compare_test.py",
    "comparison_search_test.py",
    "comparison_tasks_test.py",
    "convergence_test.py",
    "counterexample_test.py",
    "custom_loops_test.py",
    "custom_training_loop_test.py",
    "distribution_test.py",
    "finetune_text_test.py",
    "gradient_norms_test.py",
    "hypermodel_search_test.py",
    "image_datasets_test.py",
    "image_models_test.py",
    "killed_workers_test.py",
    "layerwise_blocks_test.py",
    "migrating_docs_test.py",
    "multi_gpu_test.py",
    "multi_worker_test.py",
    "optimizer_state_test.py",
    "output_weights_test.py",
    "owners_audit_test.py",
    "owners_test.py",
    "patched_fit_test.py",
    "per_layer_rules_test.py",
    "precision_test.py",
    "private_search_docs_test.py",
    "private_search_refusals_test.py",
    "private_search_test.py",
    "replicas_benchmark_test.py",
    "resume_test.py",
    "run_history_test.py",
    "sampling_passes_test.py",
    "tables_docs_test.py",
    "tf_privacy_test.py",
    "train_image_classifier_test.py",
    "train_on_features_test.py",
    "train_table_test.py",
    "units_docs_test.py",
    "units_test.py",
    "workflow_callbacks_test.py",
    "workflow_finetune_applications_test.py",
    "workflow_gan_test.py",
    "workflow_image_folder_test.py",
    "workflow_lora_text_test.py",
    "workflow_masked_lstm_test.py",
    "workflow_privacy_officer_test.py",
    "workflow_table_test.py",
    "test_a_private_backup_of_moving_thresholds_goes_on_bit_for_bit",
    "test_a_schedule_goes_on_where_epsilon_counts_after_a_cycle_that_was_cut_short",
    "test_a_table_of_what_the_theorem_says",
    "test_an_output_without_weights_has_weight_1",
    "test_b16_one_epsilon_for_one_run",
    "test_batches_of_another_size_than_the_optimizer_expects_warn",
    "test_calibrated_noise_lets_all_steps_be_made",
    "test_calibration_hands_each_field_on",
    "test_case_18_chunks_change_nothing_to_rounding_errors_included",
    "test_case_4_files_of_every_class_load_in_a_fresh_process",
    "test_command_line",
    "test_compiled_gram_matrices_of_any_batch",
    "test_equals_a_loop_over_examples[bidirectional]",
    "test_equals_a_loop_over_examples[conv1d_causal]",
    "test_equals_a_loop_over_examples[conv2d_groups]",
    "test_equals_a_loop_over_examples[conv2d_same_strides]",
    "test_equals_a_loop_over_examples[embedding_tied]",
    "test_equals_a_loop_over_examples[gru_backwards]",
    "test_equals_a_loop_over_examples[gru_reset_before]",
    "test_equals_a_loop_over_examples[lstm_from_a_state]",
    "test_equals_a_loop_over_examples[lstm_returns_state]",
    "test_equals_a_loop_over_examples[simple_rnn]",
    "test_equals_a_loop_over_examples[stacked_rnn]",
    "test_equals_a_loop_over_examples[token_and_position]",
    "test_equals_a_loop_over_examples_in_the_same_policy",
    "test_feedback_is_chosen_by_steps_data_and_noise",
    "test_noise_follows_the_thresholds_and_counts_have_their_own",
    "test_norms_and_sums_equal_a_loop_over_examples",
    "test_norms_and_sums_equal_a_loop_over_units",
    "test_padding_for_replicas_that_lost_its_weight_is_refused",
    "test_pld_of_kept_rounds_is_what_dp_accounting_says_and_grows_with_every_step",
    "test_sums_equal_a_loop_over_examples",
    "test_the_code_runs_from_top_to_bottom",
    "test_the_table_of_feedback_steps_is_what_a_plan_chooses",
    "test_thresholds_hold_to_the_precision_of_float32",
    "test_two_replicas_move_thresholds_as_one",
    "test_without_clipping_and_noise_equals_keras_sgd_over_20_steps",
    "test_without_clipping_and_noise_equals_the_original_over_20_steps",
}


def pytest_collection_modifyitems(items):
    """Marks long tests."""
    for item in items:
        if {item.path.name, item.originalname, item.name} & LONG:
            item.add_marker(pytest.mark.long)


# Of the check itself: every model anew.
CHECKS_EVERY_MODEL = {
    "cases2_first_check_test.py",
    "counterexample_test.py",
    "self_check_test.py",
    "self_check_untraced_test.py",
}


@pytest.fixture(autouse=True)
def _compares_models_that_are_alike_once(request, monkeypatch):
    """Of stock models that are alike in all, a test process compares the first one only.

    The comparison of the first batch with single examples is a third of the time of a short
    `fit`, and tests make hundreds of equal models. Layers, losses and data of a test's own are
    compared each time.
    """
    if request.path.name in CHECKS_EVERY_MODEL:
        return
    from dice_tf.checks import self_check

    check = self_check.check_against_single_examples

    def check_once(model, engine, x, y, sample_weight=None, *options):
        what = _what_is_compared(model, engine, (x, y, sample_weight), options)
        if what in _compared:
            return True
        settled = check(model, engine, x, y, sample_weight, *options)
        if settled and what is not None:
            _compared.add(what)
        return settled

    monkeypatch.setattr(self_check, "check_against_single_examples", check_once)


_compared = set()


def _what_is_compared(model, engine, data, options):
    """Returns what is equal for equal stock models; `None` if something is not of Keras."""
    import keras
    import tensorflow as tf

    layers = model._flatten_layers()
    own = {keras.Sequential, keras.Model, keras.src.models.functional.Functional}
    stock = all(type(layer) in own or _is_stock(layer) for layer in layers)
    losses = keras.tree.flatten(model._compile_loss._user_loss)
    if not stock or not all(isinstance(loss, str) or _is_stock(loss) for loss in losses):
        return None
    parts = [model.get_config(), keras.saving.serialize_keras_object(losses)]
    text = json.dumps(parts, default=str)
    if '"function"' in text or "lambda" in text:
        return None
    for number, layer in enumerate(layers):
        text = re.sub(rf'"{re.escape(layer.name)}"', f'"{number}"', text)
    shapes = str(tf.nest.map_structure(lambda t: t if t is None else (t.shape, t.dtype), data))
    return engine.func, str(engine.keywords), text, shapes, options


def _is_stock(thing):
    import keras

    return type(thing).__module__.startswith("keras.") and not isinstance(
        thing, keras.layers.Lambda
    )


# Of searches: `searches.py` has what they train.


@pytest.fixture
def three_trials(monkeypatch):
    """A search makes three trials."""
    name = "dice_tf.accounting.repeated_selection.draw_number_of_trials"
    monkeypatch.setattr(name, lambda mean, shape: 3)


@pytest.fixture
def one_epsilon_for_all(monkeypatch):
    """Computes each epsilon once, since many searches here are alike."""
    import searches

    import dice_tf

    warnings.simplefilter("ignore", dice_tf.errors.UnaccountedStepsWarning)
    name = "dice_tf.accounting.repeated_selection.selection_epsilon"
    monkeypatch.setattr(name, searches.SELECTION_EPSILON)
