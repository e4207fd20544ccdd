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

# The nodes prove to each other that they belong to this job with a key, which only its owner may read, in a folder
# that all nodes see. A job that was killed and runs again makes another.
private="$SLURM_SUBMIT_DIR/.drumline-$SLURM_JOB_ID"
rm -rf -- "$private"
mkdir -m 700 -- "$private" || exit 1
trap 'rm -rf -- "$private"' EXIT
(umask 077 && head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n' >"$private/key") || exit 1
export DRUMLINE_JOB_KEY_FILE="$private/key"

# Hands a signal on to srun. One that comes before srun is ready is kept for it. Slurm gives this script the variables of
# whoever submitted it: these must not come from there.
srun=
early=
tell() {
    again=1
    if [ -n "$srun" ]; then
        kill -s "$1" "$srun" 2>/dev/null
    else
        early="$early $1"
    fi
}

# Where Slurm ends the whole job it tells the ranks itself; a second SIGTERM would cut their time short.
told_to_stop() {
    again=1
    if [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then
        tell TERM
    fi
}
trap told_to_stop TERM

# Time is nearly up: the ranks get SIGUSR1, the request to save a checkpoint and end, and the job will run again.
requeue=
warned() {
    requeue=1
    tell USR1
}
trap warned USR1

set -m
srun --ntasks-per-node=1 --cpus-per-task=8 /opt/drumline run --nproc-per-node=gpu --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --shutdown-timeout=108 --max-restarts=3 -- train.py --lr 0.1 &
started=$!
set +m

# A process that has just been started would lose a signal, or end by it.
sleep 1
srun=$started
for signal in $early; do
    kill -s "$signal" "$srun" 2>/dev/null
done

# A trap ends the waiting early.
again=1
while [ -n "$again" ]; do
    again=
    wait "$srun"
    code=$?
done

# Back to the queue. The next run sees SLURM_RESTART_COUNT, which says how many there were before it.
if [ -n "$requeue" ]; then
    rm -rf -- "$private"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
