# SPDX-License-Identifier: Apache-2.0
find_python() { # prints a Python of this version, also one that pyenv keeps; fails when there is none
  local candidate
  for candidate in "python$1" "$(pyenv root 2>/dev/null || echo .)"/versions/"$1".*/bin/python3; do
    if "$candidate" -c 'import ensurepip, sys; sys.exit("%d.%d" % sys.version_info[:2] != sys.argv[1])' "$1" 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  return 1
}
