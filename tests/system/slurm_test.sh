#!/usr/bin/env bash
# Runs scripts/slurm.sbatch with programs in place of srun and scontrol: only a run that has saved is queued again.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/bin"

fail() {
  echo "error: $*" >&2
  exit 1
}

# srun writes down its arguments, and what the tasks see, and ends as the job does.
cat > "$folder/bin/srun" << 'EOF'
#!/bin/sh
echo "srun $* with $OMP_NUM_THREADS threads" >> "$CALLS"
[ -z "${SIGNALLED:-}" ] || kill -"$SIGNALLED" "$PPID"
exit "$CODE"
EOF
cat > "$folder/bin/scontrol" << 'EOF'
#!/bin/sh
echo "scontrol $*" >> "$CALLS"
EOF
chmod +x "$folder/bin/srun" "$folder/bin/scontrol"

# submit CODE [OPTION...]: the script in a job of 12 processors a task whose tasks end with CODE. Slurm runs a
# copy of the script.
cp "$root/scripts/slurm.sbatch" "$folder/slurm_script"
submit() {
  local code=$1 status=0
  shift
  : > "$folder/calls"
  (cd / && PATH=$folder/bin:$PATH CALLS=$folder/calls CODE=$code SLURM_SUBMIT_DIR=/work SLURM_JOB_ID=17 \
    SLURM_CPUS_PER_TASK=12 bash "$folder/slurm_script" "$@" > "$folder/log" 2>&1) || status=$?
  echo "$status"
}

tasks="srun --distribution=block --gpu-bind=none --kill-on-bad-exit=0 --wait=120 \
/work/build/release/sbtrain train --config a.yaml --train.lr=2e-4 with 12 threads"
for code in 0 3 7 85; do
  status=$(submit "$code" --config a.yaml --train.lr=2e-4)
  [[ $status == "$code" ]] || fail "exit status $status, not $code: $(cat "$folder/log")"
  wanted=$tasks
  [[ $code != 85 ]] || wanted+=$'\n'"scontrol requeue 17"
  [[ $(cat "$folder/calls") == "$wanted" ]] || fail "exit code $code: $(cat "$folder/calls")"
done

# The signals that tell the tasks to save must not end the script, which would then not queue the job again.
for signal in TERM USR1; do
  status=$(SIGNALLED=$signal submit 85 --config a.yaml)
  [[ $status == 85 ]] || fail "exit status $status after SIG$signal"
  grep -q "^scontrol requeue 17$" "$folder/calls" || fail "not queued again after SIG$signal"
done

# Without options nothing is started.
status=$(submit 0)
[[ $status == 2 && ! -s $folder/calls ]] || fail "without options: $status, $(cat "$folder/calls")"

# One task for each GPU, and time to save before the end.
for option in ntasks-per-node=8 gpus-per-node=8 requeue signal=USR1@300; do
  grep -q "^#SBATCH --$option$" "$root/scripts/slurm.sbatch" || fail "no #SBATCH --$option"
done
