#!/usr/bin/env bash
# What action.yml runs; it reads PARITY_IMPLEMENTATIONS (a line each), PARITY_PROFILE, PARITY_ARGUMENTS and PARITY_PYTHON.
# It ends with the exit code of `parity run`, after the summary is where the job shows it. PARITY_BASE is a results file to compare
# with; on the pull request of number PARITY_PULL_REQUEST one comment is kept.
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
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
"$python" -m parity run --profile "${PARITY_PROFILE:-pr}" \
  --reports "$reports" "${chosen[@]}" ${arguments[@]+"${arguments[@]}"}
code=$?
[ -z "${GITHUB_STEP_SUMMARY:-}" ] || [ ! -f "$reports/summary.md" ] || cat "$reports/summary.md" >> "$GITHUB_STEP_SUMMARY"
comment() {
  local at=repos/$GITHUB_REPOSITORY/issues body=$reports/comment.md mark='<!-- parity -->' id
  echo "$mark" > "$body"
  { [ -f "${PARITY_BASE:-}" ] && "$python" -m parity report "$reports/results.ndjson" --against "$PARITY_BASE" >> "$body"; } ||
    cat "$reports/summary.md" >> "$body" || return 1
  id=$(gh api --paginate "$at/$PARITY_PULL_REQUEST/comments" --jq ".[] | select(.body | startswith(\"$mark\")) | .id") || return 1
  if [ -n "$id" ]; then
    gh api --silent -X PATCH "$at/comments/${id%%$'\n'*}" -F "body=@$body"
  else
    gh api --silent "$at/$PARITY_PULL_REQUEST/comments" -F "body=@$body"
  fi
}
[ -z "${PARITY_PULL_REQUEST:-}" ] || comment || echo "parity: the comment was not written" >&2
[ -z "${GITHUB_OUTPUT:-}" ] || echo "exit-code=$code" >> "$GITHUB_OUTPUT"
exit $code
