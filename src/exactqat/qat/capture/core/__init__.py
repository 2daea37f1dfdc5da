# SPDX-License-Identifier: Apache-2.0
"""What capturing a model needs in every framework."""
