# What .ci/run and .ci/nightly share: parts with their times, fresh copies, server programs.
# A part is a name and a command. Reports (junit files, logs, a table of the parts) go into
# CI_REPORTS, otherwise into .ci/reports.
set -euo pipefail
exec </dev/null
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Under CI=true a test whose server is missing fails instead of being skipped.
export CI=true PIP_DISABLE_PIP_VERSION_CHECK=1
unset VIRTUAL_ENV PYTHONPATH DJANGO_SETTINGS_MODULE PYTEST_ADDOPTS
unset SAFE_TEST_SETTINGS REDIS_URL DATABASE_URL CELERY_BROKER_URL

mkdir -p "${CI_REPORTS:=$PWD/.ci/reports}"
reports=$(cd "$CI_REPORTS" && pwd)
work=$(mktemp -d "${TMPDIR:-/tmp}/safe-ci-XXXXXX")
trap finish EXIT
# Otherwise a part that a signal ends would count as passed.
trap 'exit 143' HUP INT TERM

# One line for each part that has ended: its exit code, its seconds and its name.
parts=$work/parts
touch "$parts"
# Not empty: a failed part does not keep the others from running.
keep_going=
waiting=()

fail() {
    printf '%s: %s\n' "$0" "$1" >&2
    exit 1
}

heading() {
    printf '\n=== %s (%d s) ===\n' "$1" "$SECONDS"
}

# Run a command and note what became of it. No caller stands in an `if` or before `||`, where
# bash would go on after an error inside of the command.
run_part() {
    local began=$SECONDS status
    set +e
    (
        set -e
        "${@:2}"
    )
    status=$?
    printf '%d\t%d\t%s\n' "$status" $((SECONDS - began)) "$1" >>"$parts"
}

# Run a part; after a failure end, unless the others are to run too.
part() {
    heading "$1"
    run_part "$@"
    stop_if_failed
}

# Begin a part beside others; `together` waits for them.
beside() {
    run_part "$@" >"$work/$1.log" 2>&1 &
    waiting+=("$!" "$1")
}

together() {
    set -- "${waiting[@]}"
    waiting=()
    while [ $# -gt 0 ]; do
        wait "$1"
        heading "$2"
        cat "$work/$2.log"
        shift 2
    done
    stop_if_failed
}

any_failed() {
    grep -qv '^0' "$parts"
}

stop_if_failed() {
    set -e
    if [ -z "$keep_going" ] && any_failed; then exit 1; fi
}

# Print the table of the parts, and write it as a junit file too.
finish() {
    local status=$?
    trap - EXIT
    # What still runs beside a part that failed.
    jobs -p | xargs -r kill 2>/dev/null || true
    heading "Parts"
    awk -F'\t' '
        BEGIN { printf "%-40s %6s %8s\n", "part", "exit", "seconds" }
        { printf "%-40s %6d %8d\n", $3, $1, $2 }
    ' "$parts" | tee "$reports/parts.txt"
    awk -F'\t' '
        BEGIN { print "<testsuites><testsuite name=\"parts\">" }
        {
            printf "<testcase classname=\"parts\" name=\"%s\" time=\"%d\">", $3, $2
            if ($1) printf "<failure message=\"exit code %d\"/>", $1
            print "</testcase>"
        }
        END { print "</testsuite></testsuites>" }
    ' "$parts" >"$reports/parts.xml"
    if any_failed && [ "$status" -eq 0 ]; then status=1; fi
    [ "$status" -ne 0 ] || echo "All passed."
    rm -rf "$work"
    exit "$status"
}

# Have the pytest of a command write a junit file of this name.
with_report() {
    PYTEST_ADDOPTS="--junitxml=$reports/$1.xml --durations=20" "${@:2}"
}

# Put what is committed into a new folder, with nothing that a developer has lying around.
fresh_copy() {
    mkdir "$work/$1"
    git -c safe.directory="$PWD" archive HEAD | tar -x -C "$work/$1"
}

# Make a virtual environment with everything that working on the package needs.
install_dev() {
    python3 -m venv .venv
    .venv/bin/pip install -q -U pip
    .venv/bin/pip install -q -c constraints.txt -e '.[memcached,prometheus,redis]' --group dev
}

# Install the programs of Debian that are missing; an argument is one more package.
install_programs() {
    local as_root=() packages
    mapfile -t packages < <(missing_packages "$@")
    if [ ${#packages[@]} -eq 0 ]; then
        echo "Nothing to install."
        return
    fi
    command -v apt-get >/dev/null || fail "install these by hand: ${packages[*]}"
    [ "$(id -u)" -eq 0 ] || as_root=(sudo -n)
    "${as_root[@]}" apt-get update -q
    # RUNLEVEL=1: where init scripts start services, they leave these alone. The tests
    # start servers of their own and don't care for the system's.
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 \
        apt-get install -y -q --no-install-recommends "${packages[@]}"
}

missing_packages() {
    command -v redis-server >/dev/null || echo redis-server
    command -v memcached >/dev/null || echo memcached
    command -v postgres >/dev/null || compgen -G '/usr/lib/postgresql/*/bin/postgres' >/dev/null ||
        echo postgresql
    command -v mariadbd >/dev/null || [ -x /usr/sbin/mariadbd ] || echo mariadb-server
    command -v pgbouncer >/dev/null || [ -x /usr/sbin/pgbouncer ] || echo pgbouncer
    command -v rabbitmq-server >/dev/null || [ -x /usr/lib/rabbitmq/bin/rabbitmq-server ] ||
        echo rabbitmq-server
    command -v xgettext >/dev/null || echo gettext
    [ "${1-}" != chromium ] || command -v chromium >/dev/null ||
        command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null ||
        echo chromium
}

python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "python3 is $(python3 --version); 3.11 or later is needed"
[ -z "$(git -c safe.directory="$PWD" status --porcelain)" ] ||
    echo "Note: there are uncommitted changes; only what is committed is checked."
