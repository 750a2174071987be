# Steps whose time is noted, tests that were skipped or ran twice, and tools of cargo: shared by `.ci/run` and `tests/run`, which
# source it.
#
# MUSTER_STEPS names the file of the steps, a line each: seconds, status, name; without it nothing is noted. MUSTER_SKIPS names
# the file of the skipped tests, which tests/support/skip.rs writes, MUSTER_FLAKES that of the tests which passed only when they
# ran again, a line each, and MUSTER_FAILURES that of what failed tests said.

# Runs a command under a name, and notes the time that it took.
step() {
    local name=$1 began=$SECONDS status=0
    shift
    echo "== $name"
    "$@" || status=$?
    [ -z "${MUSTER_STEPS:-}" ] || printf '%s\t%s\t%s\n' "$((SECONDS - began))" "$status" "$name" >>"$MUSTER_STEPS"
    return "$status"
}

# Prints how many tests were skipped, and which, with the reason of each.
print_skips() {
    echo "skipped: $(wc -l <"$MUSTER_SKIPS")"
    cut -f 1 "$MUSTER_SKIPS" | sort | uniq -c
    sed 's/^[^\t]*\t/        /' "$MUSTER_SKIPS"
}

# Prints which tests passed only when they ran again.
print_flakes() {
    echo "passed only when they ran again: $(wc -l <"$MUSTER_FLAKES")"
    sed 's/^/        /' "$MUSTER_FLAKES"
}

# Notes what the failed tests in an output of `cargo test` said, without stack backtraces: `note_failures OUTPUT`.
note_failures() {
    awk '/^---- .* stdout ----$/ { told = 1; lines = 0 }
         /^stack backtrace:$|^failures:$/ { told = 0 }
         told && lines++ < 12 { print substr($0, 1, 600) }' "$1" >>"$MUSTER_FAILURES"
}

# Prints what failed tests said, those included that passed when they ran again.
print_failures() {
    [ ! -s "$MUSTER_FAILURES" ] || { echo "failed tests said:" && tail -n 80 "$MUSTER_FAILURES"; }
}

# Installs a tool of cargo into target/tools: `tool NAME VERSION`. A debug build takes a third of the time, and the tools run for
# seconds.
tool() {
    local version
    version=$(target/tools/bin/"$1" --version 2>/dev/null || true)
    [[ $version = *"$2"* ]] ||
        CARGO_PROFILE_DEV_DEBUG=0 cargo install --quiet --locked --debug --root target/tools --force "$1@$2"
}
