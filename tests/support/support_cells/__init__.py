# SPDX-License-Identifier: Apache-2.0
"""What the cells of the table of docs/support.md run (`support_table.py`). Not tests."""
