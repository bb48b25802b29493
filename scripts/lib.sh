# Functions for the scripts. They install packages and programs, and change to the root of the repository.
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

# need_venv LOCK: install Shoal and the packages of requirements/LOCK.txt (core, all or test) into .venv. Does nothing if
# the files have not changed since, or the packages of the tests are installed: they include all others. pip checks the
# hash of every package.
need_venv() {
  local lock=$1 stamp
  need_python
  stamp=$(stamp_of "$lock")
  if ! is_stamped "$lock" && ! is_stamped test; then
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    echo "installing shoal and requirements/$lock.txt into .venv ..."
    install_locked build "$lock"
    "$venv/bin/python" -m pip install "${quiet[@]}" --no-deps --no-build-isolation -e "$root"
    printf '%s' "$stamp" > "$venv/.stamp-$lock"
  fi
}

stamp_of() {
  echo "$("$python" --version) $(cat "$root/pyproject.toml" "$root/requirements/build.txt" "$root/requirements/$1.txt" | cksum)"
}

is_stamped() {
  [ "$(cat "$venv/.stamp-$1" 2>/dev/null)" = "$(stamp_of "$1")" ]
}

# install_locked LOCK...: install the packages of these lock files into the virtual environment.
quiet=(--quiet --quiet --disable-pip-version-check)
install_locked() {
  "$venv/bin/python" -m pip install "${quiet[@]}" --require-hashes --only-binary :all: \
    $(printf -- " --requirement requirements/%s.txt" "$@")
}

# need_tools LOCK: install the programs of requirements/LOCK.txt into an environment of their own, .venv-LOCK.
need_tools() {
  local venv="$root/.venv-$1" stamp
  need_python
  stamp="$("$python" --version) $(cksum < "requirements/$1.txt")"
  if [ "$(cat "$venv/.stamp" 2>/dev/null)" != "$stamp" ]; then
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    echo "installing requirements/$1.txt into .venv-$1 ..."
    install_locked "$1"
    printf '%s' "$stamp" > "$venv/.stamp"
  fi
}

uv() {
  UV_SYSTEM_CERTS=1 "$root/.venv-tools/bin/uv" "$@"
}

# need_command NAME PACKAGE: if this program is missing, install_missing will install the Debian package.
missing=()
need_command() {
  command -v "$1" > /dev/null || missing+=("$2")
}

# need_file PATTERN PACKAGE: the same for a file.
need_file() {
  compgen -G "$1" > /dev/null || missing+=("$2")
}

# install_missing: install all missing packages at once, which is much faster than one by one.
install_missing() {
  [ ${#missing[@]} -gt 0 ] || return 0
  echo "installing ${missing[*]} ..."
  export DEBIAN_FRONTEND=noninteractive
  install_packages 2> /dev/null || { apt-get update -qq && install_packages; }
  missing=()
}

install_packages() {
  apt-get -o DPkg::Lock::Timeout=300 install -y -qq --no-install-recommends "${missing[@]}" > /dev/null
}

# need_servers: install the servers and tools that the tests start.
need_servers() {
  need_command openssl openssl
  need_command redis-server redis-server
  need_command mariadbd mariadb-server
  need_file '/usr/lib/postgresql/*/bin/postgres' postgresql
  need_file /usr/sbin/pgbouncer pgbouncer
  need_command java default-jre-headless
  need_file /usr/share/java/zookeeper.jar libzookeeper-java
  need_file '/usr/lib/*/faketime/libfaketime.so.1' faketime
  need_command ip iproute2
  need_command chromium chromium
  need_command tor tor
  need_command node nodejs
  need_command npm npm
  install_missing
}

# need_node_servers: install the servers of object storage that the tests start, from requirements/node/, into
# .node-servers. Does nothing if the lock file has not changed since. npm checks the hash of every package.
need_node_servers() {
  local folder="$root/.node-servers" stamp
  stamp="$(node --version) $(cat requirements/node/*.json | cksum)"
  if [ "$(cat "$folder/.stamp" 2>/dev/null)" != "$stamp" ]; then
    mkdir -p "$folder"
    cp requirements/node/*.json "$folder/"
    echo "installing requirements/node into .node-servers ..."
    (cd "$folder" && npm ci --silent --ignore-scripts --no-audit --no-fund)
    printf '%s' "$stamp" > "$folder/.stamp"
  fi
}

# need_program NAME PACKAGE: unpack one program of a Debian package into the virtual environment. The package itself is
# not installed, because it would start services.
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
