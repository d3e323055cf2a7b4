#!/bin/sh
# Make a virtual environment: tools/venv.sh FOLDER [PYTHON]
# One that is whole is kept where it stands; FOLDER/home says where that is.
# For a PYTHON of another version it is made anew. uv would need an environment
# to be installed in, and a moved one that it made does not work either.
set -eu
folder=$1
named=${2-}
here=$(pwd -P)

version() {
  "$1" -c 'import sys; print(sys.version)' 2>/dev/null
}

# A package gets its programs last, and then the name of its installer.
fits() {
  "$folder/bin/python" -c 'import pip' 2>/dev/null || return
  for package in "$folder"/lib/python*/site-packages/*.dist-info
  do
    [ -e "$package/INSTALLER" ] || return
  done
  [ ! "$named" ] ||
    [ "$(version "$folder/bin/python")" = "$(version "$named")" ]
}

if [ "$(cat "$folder/home" 2>/dev/null)" = "$here" ] && fits; then
  exit
elif [ "${ALONE_WITH-}" ]; then
  if [ -e "$folder/home" ] || ! fits; then
    echo "Making $folder with $("$ALONE_WITH" --version)"
    "$ALONE_WITH" -m venv --clear "$folder"
  fi
  printf '%s\n' "$here" > "$folder/home"
  exit
fi

recent='import sys; sys.exit(sys.version_info < (3, 11))'
set -- python3 python python3.14 python3.13 python3.12 python3.11
[ ! "$named" ] || set -- "$named"
for python in "$@"
do
  if "$python" -c "$recent" 2>/dev/null; then
    if "$python" -c 'import ensurepip, venv' 2>/dev/null; then
      export ALONE_WITH="$python"
      exec "$python" "$(dirname "$0")/alone.py" \
        sh "$0" "$folder" ${named:+"$named"}
    fi
    echo "$python has no venv module: install your system's python3-venv." >&2
    exit 1
  fi
done
echo "No Python >= 3.11 found: install one, or name it:" \
  "make PYTHON=/path/to/python3" >&2
exit 1
