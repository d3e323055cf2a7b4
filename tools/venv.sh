#!/bin/sh
# Make a virtual environment: tools/venv.sh FOLDER [PYTHON]
# One that is whole is kept where it stands; FOLDER/home says where that is.
set -eu
folder=$1
here=$(pwd -P)

# The list of pip's files is the last of what a new environment needs.
whole() {
  "$folder/bin/python" -c \
    'from importlib.metadata import files; assert files("pip")' 2>/dev/null
}

if [ "$(cat "$folder/home" 2>/dev/null)" = "$here" ] && whole; then
  exit
elif [ "${3-}" = alone ]; then
  if [ -e "$folder/home" ] || ! whole; then
    echo "Making $folder with $("$2" --version)"
    "$2" -m venv --clear "$folder"
  fi
  printf '%s\n' "$here" > "$folder/home"
  exit
fi

recent='import sys; sys.exit(sys.version_info < (3, 11))'
shift
[ $# -gt 0 ] || set -- python3 python python3.14 python3.13 python3.12 python3.11
for python in "$@"
do
  if "$python" -c "$recent" 2>/dev/null; then
    if "$python" -c 'import ensurepip, venv' 2>/dev/null; then
      exec "$python" "$(dirname "$0")/alone.py" sh "$0" "$folder" "$python" alone
    fi
    echo "$python has no venv module: install your system's python3-venv." >&2
    exit 1
  fi
done
echo "No Python >= 3.11 found: install one, or name it: make PYTHON=/path/to/python3" >&2
exit 1
