# SPDX-License-Identifier: Apache-2.0
"""What happens when the package is imported, or started as a command."""
