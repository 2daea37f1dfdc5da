# SPDX-License-Identifier: Apache-2.0
"""What users look at: the page on a job, its charts and findings, finished jobs side by side."""
