# SPDX-License-Identifier: Apache-2.0
"""The application on top of the kit: jobs and their reports."""
