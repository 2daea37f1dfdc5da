# SPDX-License-Identifier: Apache-2.0
"""How `capture` reads a jaxpr: one file for each family of primitives, entered into the converter's table."""
