#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs `exactqat gate` with the inputs of the action, which come as variables; an empty one is left out.
set -euo pipefail

arguments=("${NETWORK:?network is missing}")
add() { if [ -n "$2" ]; then arguments+=("$1" "$2"); fi; }
add --data "${DATA:-}"
add --min-accuracy "${MIN_ACCURACY:-}"
add --metric "${METRIC:-}"
add --min-score "${MIN_SCORE:-}"
add --max-score "${MAX_SCORE:-}"
add --max-differ "${MAX_DIFFER:-}"
add --max-flips "${MAX_FLIPS:-}"
for device in ${DEVICES:-}; do arguments+=(--device "${device}"); done
if [ "${RUN:-false}" = true ]; then arguments+=(--run); fi

folder="${FOLDER:-exactqat-gate}"
mkdir -p "${folder}"
rm -f "${folder}/gate.md"  # of an earlier run
status=0
exactqat gate "${arguments[@]}" --junit "${folder}/junit.xml" --markdown "${folder}/gate.md" \
  --badge "${folder}/badge.json" || status=$?
if [ -f "${folder}/gate.md" ]; then cat "${folder}/gate.md" >> "${GITHUB_STEP_SUMMARY:-/dev/null}"; fi
if [ "${status}" = 0 ]; then passes=true; else passes=false; fi
printf 'passes=%s\nfolder=%s\n' "${passes}" "${folder}" >> "${GITHUB_OUTPUT:-/dev/null}"
exit "${status}"
