#!/usr/bin/env bash
# Shows: a model is exported as safetensors in the format of Hugging Face's GPT-2, imported, and fine-tuned on other text.
# About 30 seconds.
#
#   examples/08-fine-tune.sh
#
# HPCTRAIN names the program (default ./target/release/hpctrain).
set -euo pipefail
HPCTRAIN=${HPCTRAIN:-./target/release/hpctrain}

export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe

runs=$(mktemp -d "${TMPDIR:-/tmp}/hpctrain-08.XXXXXX")
# Bytes as tokens: the vocabulary is the same for any text.
for text in README.md docs/architecture.md; do
    "$HPCTRAIN" data import text "$text" --tokenizer byte --val-fraction 0.2 --out "$runs/$(basename "$text" .md)" >/dev/null
done
train() {
    mpirun -np 2 "$HPCTRAIN" train --set run.root="$runs" --set eval.every=0 --set log.sample_tokens=0 "$@" |
        grep -E '^(resumed|validation)' || true
}

echo "a model of the README:"
train --set run.name=base --set model.bias=true --set data.path="$runs/README" --set run.steps=200

# transformers.GPT2LMHeadModel.from_pretrained reads this directory as it is, and models that it writes come back the
# same way.
"$HPCTRAIN" checkpoint export "$runs/base" --out "$runs/exported"
ls "$runs/exported"
"$HPCTRAIN" checkpoint import "$runs/exported" --out "$runs/imported" --tokenizer byte
"$HPCTRAIN" checkpoint diff --weights-only "$runs/base" "$runs/imported"

echo "fine-tuned on the architecture page for 50 steps, and as many steps from nothing:"
other=(--set model.bias=true --set data.path="$runs/architecture" --set run.steps=50 --set lr_schedule.warmup=5)
train --set run.name=tuned "${other[@]}" --resume "$runs/imported" --weights-only
train --set run.name=fresh "${other[@]}"
