# SPDX-License-Identifier: Apache-2.0
"""The main job: train, quantize, deploy and prove, from one command (`exactqat train`).

`job.settings.Settings` holds the user's decisions, `job.pipeline.run` carries them out. What is wrong with what a user
gives, or with a file of anyone's, is a ValueError or an OSError whose message says what and where: the command line
shows it as it is.
"""
