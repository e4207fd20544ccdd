#!/bin/bash
#SBATCH --job-name=train.py
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=4:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --open-mode=append
#SBATCH --requeue

# The nodes prove to each other that they belong to this job with a key. Only its owner may read it, in a folder
# that all nodes see. A job that was killed and runs again makes another key.
private="$SLURM_SUBMIT_DIR/.drumline-$SLURM_JOB_ID"
rm -rf -- "$private"
mkdir -m 700 -- "$private" || exit 1
trap 'rm -rf -- "$private"' EXIT
(umask 077 && head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n' >"$private/key") || exit 1
export DRUMLINE_JOB_KEY_FILE="$private/key"

# Passes a signal on to srun. A signal that comes before srun is ready is kept for it. Slurm gives this script the
# variables of the user who submitted it, so these are reset here.
srun=
early=
pass_on() {
    again=1
    if [ -n "$srun" ]; then
        kill -s "$1" "$srun" 2>/dev/null
    else
        early="$early $1"
    fi
}

# When Slurm ends the whole job it signals the ranks itself; a second SIGTERM would cut their time short.
on_term() {
    again=1
    if [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then
        pass_on TERM
    fi
}
trap on_term TERM

# Time is nearly up: the ranks get SIGUSR1, the request to save a checkpoint and end, and the job will run again.
requeue=
warned() {
    requeue=1
    pass_on USR1
}
trap warned USR1

set -m
srun --ntasks-per-node=1 --cpus-per-task=8 /opt/drumline run --nproc-per-node=gpu --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --shutdown-timeout=108 --max-restarts=3 -- train.py --lr 0.1 &
started=$!
set +m

# A process that has just started would lose a signal, or be killed by it.
sleep 1
srun=$started
for signal in $early; do
    kill -s "$signal" "$srun" 2>/dev/null
done

# A trap ends the wait early.
again=1
while [ -n "$again" ]; do
    again=
    wait "$srun"
    code=$?
done

# Back to the queue. The next run sees SLURM_RESTART_COUNT, the number of runs before it.
if [ -n "$requeue" ]; then
    rm -rf -- "$private"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
