#!/usr/bin/env bash
# Runs jobs of scripts/slurm.sbatch on a Slurm of one machine that this test starts and ends: what they do when they are
# cancelled, warned, queued again and preempted. Skipped (77) where Slurm's daemons are not installed, such as by
# `apt-get install slurmctld slurmd slurm-client`. What is in place of sbtrain saves when it is told to, as sbtrain does.
#   slurm_cluster_test.sh [SCRIPT]
set -euo pipefail
script=${1:-$(cd "$(dirname "$0")/../.." && pwd)/scripts/slurm.sbatch}
PATH=$PATH:/usr/sbin

# program NAME: where it is; Debian's packages call their daemons NAME-wlm.
program() {
  command -v "$1" || command -v "$1-wlm" || {
    echo "skipped: there is no $1" >&2
    exit 77
  }
}
slurmctld=$(program slurmctld)
slurmd=$(program slurmd)
slurmstepd=$(program slurmstepd)
sbatch=$(program sbatch)

folder=$(mktemp -d)
daemons=()
# shellcheck disable=SC2317  # called by the trap
finish() {
  scancel --full --signal=KILL --user="$(id -un)" 2> /dev/null || true
  [[ ${#daemons[@]} == 0 ]] || kill "${daemons[@]}" 2> /dev/null || true
  wait
  rm -rf "$folder"
}
trap finish EXIT

fail() {
  echo "error: $*" >&2
  tail -n 20 "$folder"/*.log "$folder"/*.out "$folder/calls" >&2 || true
  exit 1
}

# Everything lies in the folder, and ports are free ones. A job that is queued again may begin when the credentials of
# its first start have expired, two minutes later unless it is said.
read -r -a ports < <(python3 -c "
import socket
sockets = [socket.create_server(('127.0.0.1', 0)) for _ in range(2)]
print(*(s.getsockname()[1] for s in sockets))")
machine=$(hostname -s)
export SLURM_CONF=$folder/slurm.conf
cat > "$SLURM_CONF" << END
ClusterName=test
SlurmctldHost=$machine(127.0.0.1)
SlurmctldPort=${ports[0]}
SlurmdPort=${ports[1]}
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=bf_interval=1,sched_interval=1
KillWait=20
ReturnToService=2
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
NodeName=$machine NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=low Nodes=$machine Default=YES PriorityTier=1 State=UP
PartitionName=high Nodes=$machine PriorityTier=2 PreemptMode=OFF State=UP
END
plugins=$(dirname "$slurmctld")/../lib/$(uname -m)-linux-gnu/slurm-wlm  # of packages that are unpacked elsewhere
[[ ! -d $plugins ]] || echo "PluginDir=$plugins" >> "$SLURM_CONF"
mkdir "$folder/state" "$folder/spool"
"$slurmctld" -D -c > "$folder/slurmctld.out" 2>&1 & daemons+=($!)
"$slurmd" -D -d "$slurmstepd" -N "$machine" > "$folder/slurmd.out" 2>&1 & daemons+=($!)

# until_true WHAT COMMAND...: waits for the command to succeed.
until_true() {
  local what=$1 start=$SECONDS
  shift
  until "$@"; do
    [[ $((SECONDS - start)) -lt 240 ]] || fail "$what: not within 240 s"
    sleep 0.2
  done
}
is_idle() { [[ $(sinfo --noheader --format=%T --partition=low 2> /dev/null) == idle ]]; }
until_true "the machine is ready" is_idle

# Two tasks, in place of a training that takes a minute and saves for a second when it is told to.
cat > "$folder/sbtrain" << 'END'
#!/bin/bash
save() {
  trap '' USR1 TERM
  echo "$SLURM_JOB_ID $1 $SLURM_PROCID" >> "$CALLS"
  sleep 1
  exit 85
}
trap 'save USR1' USR1
trap 'save TERM' TERM
echo "$SLURM_JOB_ID start-${SLURM_RESTART_COUNT:-0} $SLURM_PROCID" >> "$CALLS"
[[ ${SLURM_RESTART_COUNT:-0} == 0 ]] || exit 0  # the rest is done
for _ in {1..600}; do sleep 0.1; done
END
chmod +x "$folder/sbtrain"
export SBTRAIN=$folder/sbtrain CALLS=$folder/calls
: > "$CALLS"

calls() { grep -c "^$job $1 " "$CALLS" || true; }
calls_twice() { [[ $(calls "$1") == 2 ]]; }
says() { scontrol --oneliner show job "$job" | grep -qE "$1"; }
# submit NAME [OPTION...]: a job of two tasks; returns when they run.
submit() {
  name=$1
  shift
  job=$("$sbatch" --parsable --ntasks-per-node=2 --gpus-per-node=0 --cpus-per-task=1 --time=20 --output="$folder/$name.out" \
    "$@" "$script" --config a.yaml) || fail "$name: sbatch"
  until_true "$name: both tasks run" calls_twice start-0
}
# continued: the job is queued again once, runs again, and is complete.
continued() {
  until_true "$name: complete" says "JobState=COMPLETED"
  says "Restarts=1 " || fail "$name: $(scontrol --oneliner show job "$job")"
  [[ $(calls start-1) == 2 ]] || fail "$name: it did not run again"
}

submit cancelled
scancel "$job"
until_true "cancelled: it ends" says "JobState=CANCELLED"
until_true "cancelled: the machine is free" is_idle
[[ $(calls TERM) == 2 ]] || fail "cancelled: not all tasks have saved"
says "Restarts=0 " || fail "cancelled: queued again: $(scontrol --oneliner show job "$job")"
grep -q "^cancelled; the run has saved" "$folder/cancelled.out" || fail "cancelled: nothing is said"

# The warning comes up to a minute early: at once, here.
export SIGNAL_LEAD=100
submit warned --time=2 --signal=USR1@100
continued
unset SIGNAL_LEAD
[[ $(calls USR1) == 2 ]] || fail "warned: not all tasks have saved"
grep -q "^stopped and saved; the job is queued again" "$folder/warned.out" || fail "warned: nothing is said"

# Slurm queues a job again by itself, for an administrator and for a job of a higher priority.
submit requeued
scontrol requeue "$job"
continued
[[ $(calls TERM) == 2 ]] || fail "requeued: not all tasks have saved"

submit preempted
srun --partition=high --ntasks=2 --time=1 true || fail "preempted: the other job"
continued
[[ $(calls TERM) == 2 ]] || fail "preempted: not all tasks have saved"
