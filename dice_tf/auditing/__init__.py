# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
r"""Lower bounds on epsilon, measured on real training runs from what they release.

The accountant proves an upper bound; an audit attacks the trained model and proves, with
a chosen confidence, a lower bound. A lower bound above the reported epsilon shows that
the report is wrong: the accounting, the sampling, the clipping or the noise. A lower
bound below it shows nothing more than that this attack did not find a mistake.

An attack gives a *score* to a *canary*, an example made to be recognisable: the higher,
the more the released model looks trained with it. Two ways to turn scores into epsilon:

* many runs (`audit`): train over and over, with the canary and without, and count
  how often a threshold on the score tells the two apart;
* one run (`audit_one_run`): flip a coin for each of many canaries, train once, and
  count how many coins can be guessed from the scores.

A left-out canary is either absent from the data or, which is simpler and keeps
`num_examples`, has `sample_weight` 0: its gradient is then zero, and so is its influence.

Nothing here needs TensorFlow: training is a function that is passed in, and the rest is
statistics. `dice_tf.auditing.canaries` makes canaries for Keras models and scores them.
"""

from dice_tf.auditing.audits import (
    AuditResult,
    audit,
    audit_one_run,
    epsilon_lower_bound,
    membership_guesses,
    one_run_epsilon_lower_bound,
    one_run_p_value,
)

__all__ = [
    "AuditResult",
    "audit",
    "audit_one_run",
    "epsilon_lower_bound",
    "membership_guesses",
    "one_run_epsilon_lower_bound",
    "one_run_p_value",
]
