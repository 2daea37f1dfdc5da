# SPDX-License-Identifier: Apache-2.0
"""Training a plan. `train.core` says what a plan means in training, for every framework."""
