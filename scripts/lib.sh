# Shared by the scripts: a virtual environment of the repository's own, made when it is missing or out of date.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
venv="$root/.venv"

need_python() {
  python=${PYTHON:-python3}
  if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "Shoal needs Python 3.11 or later; set PYTHON=/path/to/python3" >&2
    exit 1
  fi
}

# need_venv EXTRAS: installs the package with these extras, once for each state of pyproject.toml.
need_venv() {
  local extras=$1 stamp
  need_python
  stamp="$("$python" --version) $extras $(cksum < "$root/pyproject.toml")"
  if [ "$(cat "$venv/.stamp-$extras" 2>/dev/null)" != "$stamp" ]; then
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    echo "installing shoal${extras:+[$extras]} into .venv ..."
    "$venv/bin/python" -m pip install --quiet --quiet --disable-pip-version-check -e ".${extras:+[$extras]}"
    printf '%s' "$stamp" > "$venv/.stamp-$extras"
  fi
}

# need_command NAME PACKAGE: a program of Debian's, installed if it is missing.
need_command() {
  command -v "$1" > /dev/null || install_package "$2"
}

# need_file PATTERN PACKAGE: the same for what is not on the path.
need_file() {
  compgen -G "$1" > /dev/null || install_package "$2"
}

# need_program NAME PACKAGE: one program out of a package of Debian's whose services are not wanted: the package is not
# installed, only the program is unpacked into the virtual environment.
need_program() {
  local folder
  if ! command -v "$1" > /dev/null && [ ! -x "$venv/bin/$1" ]; then
    echo "unpacking $1 of $2 ..."
    folder=$(mktemp -d)
    chmod 755 "$folder"
    (cd "$folder" && { apt-get download -qq "$2" || { apt-get update -qq && apt-get download -qq "$2"; }; }) 2> /dev/null
    dpkg-deb --fsys-tarfile "$folder"/*.deb | tar -x -O "./usr/bin/$1" > "$folder/$1"
    install "$folder/$1" "$venv/bin/$1"
    rm -r "$folder"
  fi
}

install_package() {
  echo "installing $1 ..."
  export DEBIAN_FRONTEND=noninteractive
  apt-get install -y -qq "$1" > /dev/null 2>&1 || { apt-get update -qq && apt-get install -y -qq "$1" > /dev/null; }
}
