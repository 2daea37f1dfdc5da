# SPDX-License-Identifier: Apache-2.0
"""The main job: train, quantize, deploy and prove, from one command (`exactqat train`).

`job.settings.Settings` holds what the user decides, `job.pipeline.run` does it.
"""
