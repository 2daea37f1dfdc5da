# SPDX-License-Identifier: Apache-2.0
"""The main job: train, quantize, deploy and prove, from one command (`exactqat train`).

`job.settings.Settings` holds the user's decisions, `job.pipeline.run` carries them out.
"""
