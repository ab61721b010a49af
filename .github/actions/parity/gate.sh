#!/usr/bin/env bash
# What action.yml runs; it reads PARITY_IMPLEMENTATIONS (a line each), PARITY_PROFILE, PARITY_ARGUMENTS and PARITY_PYTHON.
# It ends with the exit code of `parity run`, after the summary is where the job shows it.
set -u
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
python=${PARITY_PYTHON:-}
if [ -z "$python" ]; then
  python=$root/.venv/bin/python
  [ -x "$python" ] || python3 "$root/parity/bootstrap.py" --venv "$root/.venv" || exit 3
fi
chosen=()
while IFS= read -r line; do
  [ -z "${line// /}" ] || chosen+=(--implementation "$line")
done <<< "${PARITY_IMPLEMENTATIONS:-}"
[ ${#chosen[@]} -gt 0 ] || { echo "parity: no implementation named, expected FILE.py:NAME" >&2; exit 2; }
read -r -a arguments <<< "${PARITY_ARGUMENTS:-}"
reports=${PARITY_REPORTS:-reports}
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} "$python" -m parity run --profile "${PARITY_PROFILE:-pr}" \
  --reports "$reports" "${chosen[@]}" ${arguments[@]+"${arguments[@]}"}
code=$?
[ -z "${GITHUB_STEP_SUMMARY:-}" ] || [ ! -f "$reports/summary.md" ] || cat "$reports/summary.md" >> "$GITHUB_STEP_SUMMARY"
[ -z "${GITHUB_OUTPUT:-}" ] || echo "exit-code=$code" >> "$GITHUB_OUTPUT"
exit $code
