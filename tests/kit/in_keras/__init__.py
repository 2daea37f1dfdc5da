# SPDX-License-Identifier: Apache-2.0
"""A package, so that its files may be called as others of the kit's tests are, its conftest.py too."""
