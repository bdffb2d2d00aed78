#!/usr/bin/env bash
# The measurements of a release, on one or two GPUs of a machine: a step a call, each within a given time.
#
#   bash benchmarks/campaign.sh tune OUT SECONDS [TUNED]          # rows and networks, into OUT/tuned.tgz
#   bash benchmarks/campaign.sh measure OUT SECONDS COMMIT TUNED  # every contender, with what was tuned
#   bash benchmarks/campaign.sh stock OUT SECONDS COMMIT          # TVM's own tuning and ours, with as many trials
#   bash benchmarks/campaign.sh float32 OUT SECONDS COMMIT        # rows in float32, not tuned
#   bash benchmarks/campaign.sh large OUT SECONDS COMMIT          # BERT-base at batch 32, LLaMA's layer, attention
#   bash benchmarks/campaign.sh bulk OUT SECONDS                  # sm_90a: products of the copy engine, tested, then timed
#   bash benchmarks/campaign.sh tests OUT SECONDS                 # Relay's modules on the GPU, compute-sanitizer
#
# TUNED is the tuned.tgz of an earlier call. Where there are two GPUs, the rows have the first and the networks the second,
# each with half the cores; else one follows the other. What runs out of time leaves what it has, and the same call in the
# same OUT goes on: the exit codes of what ran are printed, the script's own is 0. Needs PyTorch, and tvm_fusion where Python finds it.
set -euo pipefail
cd "$(dirname "$0")/.."

step=$1 out=$2 seconds=$3 commit=${4:-} tuned=${5:-}
networks=resnet50_b1,mobilenet_v2_b1,inception_v1_b1,mobilenet_v2_b32,inception_v1_b32,resnet50_b32
automatic=eager,inductor,inductor_freeze,inductor_freeze_combo,unfused,ours
mkdir -p "$out"
gpus=$(nvidia-smi -L | wc -l)
share=$(($(nproc) / (gpus > 1 ? 2 : 1)))

# on GPU SECONDS NAME COMMAND...: on that GPU and its share of the cores; the log is OUT/NAME.log.
on() {
  local gpu=$1 limit=$2 name=$3 status=0
  shift 3
  CUDA_VISIBLE_DEVICES=$gpu taskset -c "$((gpu * share))-$(((gpu + 1) * share - 1))" \
    timeout --signal=TERM --kill-after=20 "$limit" "$@" >"$out/$name.log" 2>&1 || status=$?
  echo "$name: exit code $status"
  tail -n 15 "$out/$name.log"
}

# both FIRST SECOND: each is called with a GPU and the seconds that it has.
both() {
  if [ "$gpus" -gt 1 ]; then
    "$1" 0 "$seconds" &
    "$2" 1 "$seconds"
    wait
  else
    "$1" 0 $((seconds / 2))
    "$2" 0 $((seconds / 2))
  fi
}

tune_rows() { on "$1" "$2" tune_rows python3 benchmarks/tune_rows.py "$out/tuned0" --minutes 0.7; }
tune_networks() { on "$1" "$2" tune_networks python3 benchmarks/tune_rows.py "$out/tuned1" --rows "$networks" --minutes 1.1; }
measure() { # GPU SECONDS NAME OPTIONS...
  local gpu=$1 limit=$2 name=$3
  shift 3
  on "$gpu" "$limit" "$name" python3 benchmarks/run.py --out "$out/$name.json" --rounds 3 \
    --budget $((limit * 3 / 4)) --batch-limit $((limit / 2)) --commit "$commit" --work "$out/work-$name" "$@"
}
measure_rows() { measure "$1" "$2" rows --dtypes float16 --tuned "$out/tuned0"; }
measure_networks() {
  measure "$1" "$2" networks --rows "$networks" --dtypes float16 --tuned "$out/tuned1" --batch 2 \
    --contenders "$automatic,tvm_default"
}
stock_ours() { on "$1" "$2" stock_ours python3 benchmarks/tune_rows.py "$out/tuned64" --trials 64; }
stock_tvm() {
  measure "$1" "$2" stock --dtypes float16 --stock-tvm-trials 64 --contenders "$automatic,tvm_tuned" \
    --tuned "$out/tuned64"
}
float32_rows() { measure "$1" "$2" float32 --dtypes float32; }
large_rows() { measure "$1" "$2" large --rows bert_base_128_b32,llama7b_layer_512 --dtypes float16 --batch 1 --contenders "$automatic"; }
attention() { on "$1" "$2" attention python3 benchmarks/attention_times.py --out "$out/attention.json" --libraries "$out/work-attention"; }
bulk_tests() { on "$1" "$2" bulk_tests python3 -m pytest -q tests/gpu/test_bulk_on_gpu.py; }
bulk_times() {
  on "$1" "$2" bulk_times python3 benchmarks/hopper_times.py --seconds $(($2 - 30)) --libraries "$out/work-bulk" --out "$out/bulk.json"
}
relay_tests() { on "$1" "$2" relay python3 -m pytest -q tests/gpu -k relay; }
sanitizer_tests() { on "$1" "$2" sanitizer python3 -m pytest -q tests/gpu/test_sanitizer_on_gpu.py; }

[ -z "$tuned" ] || tar -xzf "$tuned" -C "$out"
case $step in
  tune) both tune_rows tune_networks && tar -czf "$out/tuned.tgz" -C "$out" tuned0 tuned1 ;;
  measure) both measure_rows measure_networks
    on 0 60 check python3 benchmarks/check_tuning.py "$out/rows.json" "$out/networks.json" ;;
  stock) stock_ours 0 $((seconds / 2)) && stock_tvm 0 $((seconds / 2)) ;;
  float32) float32_rows 0 "$seconds" ;;
  large) both large_rows attention ;;
  bulk) both bulk_tests bulk_times ;;
  tests) both relay_tests sanitizer_tests ;;
  *) echo "there is no step $step; see the head of this file" >&2 && exit 2 ;;
esac
