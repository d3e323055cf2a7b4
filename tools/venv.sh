#!/bin/sh
# Make a virtual environment: tools/venv.sh FOLDER [PYTHON]
# One that works where it stands is kept.
set -eu
folder=$1
shift

if [ ! -e "$folder/home" ] && "$folder/bin/python" -c 1 2>/dev/null; then
  exit
fi

recent='import sys; sys.exit(sys.version_info < (3, 11))'
for python in ${1:-python3 python python3.14 python3.13 python3.12 python3.11}
do
  if "$python" -c "$recent" 2>/dev/null; then
    if "$python" -c 'import ensurepip, venv' 2>/dev/null; then
      echo "Making $folder with $("$python" --version)"
      exec "$python" -m venv --clear "$folder"
    fi
    echo "$python has no venv module: install your system's python3-venv." >&2
    exit 1
  fi
done
echo "No Python >= 3.11 found: install one, or name it: make PYTHON=/path/to/python3" >&2
exit 1
