#!/usr/bin/env bash
# Runs scripts/slurm.sbatch with programs in place of srun and scontrol: when a job is queued again, and when not.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
script=${1:-$root/scripts/slurm.sbatch}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/bin"

fail() {
  echo "error: $*" >&2
  cat "$folder/log" >&2
  exit 1
}

# srun writes down its arguments, and what the tasks see, and ends as the job does. Slurm may signal the script
# (SIGNALLED; "end": wait until the job's time is over) while the tasks save.
cat > "$folder/bin/srun" << 'EOF'
#!/bin/sh
echo "srun $* with $OMP_NUM_THREADS threads" >> "$CALLS"
for signal in ${SIGNALLED:-}; do
  if [ "$signal" = end ]; then
    while [ "$(date +%s)" -lt "$(cat "$CALLS.end")" ]; do sleep 0.1; done
    continue
  fi
  kill -"$signal" "$PPID"
  sleep 0.1
done
exit "$CODE"
EOF
# scontrol knows a job that ends in LEFT seconds ("unlimited": never) until it is signalled; then Slurm says what AFTER
# is. REFUSAL is why it does not queue the job again. If it does, it signals the job's processes, and so itself.
cat > "$folder/bin/scontrol" << 'EOF'
#!/bin/sh
if [ "$1" = show ]; then
  end=Unknown
  if [ "$LEFT" != unlimited ]; then
    end=$(date -d "+$LEFT seconds" +%Y-%m-%dT%H:%M:%S)
    [ -f "$CALLS.end" ] || date -d "$end" +%s > "$CALLS.end"
  fi
  fields="JobState=RUNNING Reason=None EndTime=$end PreemptTime=None"
  if grep -q ^srun "$CALLS" && [ -n "${AFTER:-}" ]; then fields=$AFTER; fi
  printf 'JobId=17 JobName=sbtrain\n   UserId=me(1) GroupId=us(1)\n   %s\n' "$fields"
  exit 0
fi
echo "scontrol $*" >> "$CALLS"
if [ -n "${REFUSAL:-}" ]; then
  echo "$REFUSAL" >&2
  exit 1
fi
kill -TERM "$PPID" $$
EOF
chmod +x "$folder/bin/srun" "$folder/bin/scontrol"

# submit CODE [OPTION...]: the script in a job of 12 processors a task whose tasks end with CODE. Slurm runs a
# copy of the script.
cp "$script" "$folder/slurm_script"
submit() {
  local code=$1 status=0
  shift
  : > "$folder/calls"
  rm -f "$folder/calls.end"
  (cd / && PATH=$folder/bin:$PATH CALLS=$folder/calls CODE=$code LEFT=${LEFT:-86400} SLURM_SUBMIT_DIR=/work \
    SLURM_JOB_ID=17 SLURM_CPUS_PER_TASK=12 bash "$folder/slurm_script" "$@" > "$folder/log" 2>&1) || status=$?
  echo "$status"
}

# expect NAME CODE again|ended: the job of a run that ends with CODE.
expect() {
  local status
  status=$(submit "$2" --config a.yaml)
  [[ $status == "$2" ]] || fail "$1: exit status $status, not $2"
  if [[ $3 == again ]]; then
    [[ $(grep -c "^scontrol requeue 17$" "$folder/calls") == 1 ]] || fail "$1: not queued again"
    [[ -n ${REFUSAL:-} ]] || grep -q "; the job is queued again$" "$folder/log" || fail "$1: it does not say so"
  else
    ! grep -q "^scontrol requeue" "$folder/calls" || fail "$1: queued again"
  fi
}

tasks="srun --distribution=block --gpu-bind=none --kill-on-bad-exit=0 --wait=120 \
/work/build/release/sbtrain train --config a.yaml --train.lr=2e-4 with 12 threads"
for code in 0 3 7 85; do
  status=$(submit "$code" --config a.yaml --train.lr=2e-4)
  [[ $status == "$code" ]] || fail "exit status $status, not $code"
  wanted=$tasks
  [[ $code != 85 && $code != 7 ]] || wanted+=$'\n'"scontrol requeue 17"
  [[ $(cat "$folder/calls") == "$wanted" ]] || fail "exit code $code: $(cat "$folder/calls")"
done

# The warning before the end of the time must not end the script, which would then not queue the job again.
SIGNALLED=USR1 expect "warned" 85 again
# What Slurm 23.11 says of a cancelled job; one that it cannot be asked about is taken for cancelled as well.
SIGNALLED="CONT TERM" AFTER="JobState=CANCELLED Reason=None PreemptTime=None" expect "cancelled" 85 ended
SIGNALLED="CONT TERM" expect "cancelled, while Slurm calls it running" 85 ended
SIGNALLED="USR1 TERM" expect "cancelled after the warning" 85 ended
SIGNALLED=TERM expect "cancelled before all tasks could save" 137 ended
SIGNALLED=TERM LEFT=unlimited expect "cancelled without a limit of time" 85 ended
# The time is over, and saving has taken longer than the warning was early.
# (With one second left, the script may find none, if a second ends as it asks.)
LEFT=4 SIGNAL_LEAD=0 SIGNALLED="USR1 end TERM" expect "out of time" 85 again
# Preempted: during the time of grace, when Slurm cancels the job, and when Slurm queues it again by itself.
SIGNALLED=TERM AFTER="JobState=RUNNING Reason=None PreemptTime=2026-01-01T00:00:00" expect "preempted" 85 again
SIGNALLED=TERM AFTER="JobState=PREEMPTED Reason=None PreemptTime=None" expect "preempted and cancelled" 85 again
SIGNALLED=TERM AFTER="JobState=PENDING Reason=BeginTime PreemptTime=None" \
  REFUSAL="Job is pending execution for job 17" expect "preempted and queued again" 85 again
grep -q "Slurm has queued the job again" "$folder/log" || fail "nothing is said of a job that is queued already"
REFUSAL="Requested operation is presently disabled for job 17" expect "without --requeue" 85 again
grep -q "^error: .*presently disabled" "$folder/log" || fail "the refusal is not shown"

# A rank that was lost is tried again a few times.
SLURM_RESTART_COUNT=2 expect "lost for the third time" 7 again
SLURM_RESTART_COUNT=3 expect "lost for the fourth time" 7 ended
expect "killed by a signal" 137 again
SLURM_RESTART_COUNT=30 expect "warned for the thirty-first time" 85 again

# Without options, or with less time than the warning is early, nothing is started.
status=$(submit 0)
[[ $status == 2 && ! -s $folder/calls ]] || fail "without options: $status, $(cat "$folder/calls")"
for left in 60 300; do
  status=$(LEFT=$left submit 85 --config a.yaml)
  [[ $status == 2 && ! -s $folder/calls ]] || fail "with $left s: $status, $(cat "$folder/calls")"
  grep -q "^error: .*--time" "$folder/log" || fail "with $left s nothing is said of --time"
done
[[ $(LEFT=320 submit 0 --config a.yaml) == 0 ]] || fail "with 320 s it does not start"
[[ $(LEFT=120 SIGNAL_LEAD=60 submit 0 --config a.yaml) == 0 ]] || fail "with 120 s and a lead of 60 s it does not start"

# One task for each GPU, and time to save before the end.
for option in ntasks-per-node=8 gpus-per-node=8 requeue signal=USR1@300; do
  grep -q "^#SBATCH --$option$" "$root/scripts/slurm.sbatch" || fail "no #SBATCH --$option"
done
