# SPDX-License-Identifier: Apache-2.0
"""Prints the first shell block of a README section: CI runs the very text that people paste.

python .ci/readme_block.py README.md "Test it"
"""

import re
import sys


def main() -> None:
    path, heading = sys.argv[1:]
    with open(path, encoding="utf-8") as file:
        text = file.read()
    section = re.search(rf"^#+ {re.escape(heading)}$(.*?)(?=^#|\Z)", text, re.M | re.S)
    block = section and re.search(r"^```sh\n(.*?)^```", section[1], re.M | re.S)
    if not block:
        sys.exit(f"{path}: no ```sh block under the heading {heading!r}")
    sys.stdout.write(block[1])


if __name__ == "__main__":
    main()
