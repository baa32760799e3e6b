#!/usr/bin/env bash
# Every shipped draft method beside plain decoding, each with the K that suits it: one stream, greedy, two cores.
#
#   infra/benchmarks/methods.sh [FOLDER]      one JSON report per method (default: the current folder)
#
# Settings by environment: DTYPE (fp32), NUM_PROMPTS (2), MAX_TOKENS (64), REPEATS (2). About five minutes on a
# machine that does nothing else. The distilled draft also assists transformers' own generate.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
outrider=${OUTRIDER:-$here/../../.venv/bin/outrider}
folder=${1:-.}
# As `make bench`: threads that wait give their core away, but not at once.
export OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=20000

measure() { # NAME K SETS OPTIONS...
  echo "== $1, K=$2"
  "$outrider" bench --draft "$1" --k "$2" --prompt-sets "$3" --threads 2 --dtype "${DTYPE:-fp32}" \
    --num-prompts "${NUM_PROMPTS:-2}" --max-tokens "${MAX_TOKENS:-64}" --repeats "${REPEATS:-2}" \
    --off-runs 0 --width-rounds 0 --json "$folder/methods-${DTYPE:-fp32}-$1.json" "${@:4}"
}

measure self 5 code,chat --modes plain,speculative
measure smollm2-draft 3 code,chat --modes plain,speculative,hf_plain,hf_assisted --peer hf
measure smollm2-eagle3 2 code,chat --modes plain,speculative
measure ngram 5 code,chat,summarise --modes plain,speculative
