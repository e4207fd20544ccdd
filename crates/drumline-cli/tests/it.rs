//! The `drumline` command as a user runs it.
#![allow(clippy::unwrap_used)]

mod it {
    mod debugging;
    mod doctor;
    mod dry_run;
    mod every_op;
    mod failing;
    mod faults;
    mod fleet;
    mod fleet_job;
    mod job;
    mod joining;
    mod keeping;
    mod key;
    mod kill_matrix;
    mod kubernetes;
    mod listing;
    mod master_port;
    mod nodes;
    mod outages;
    mod plot;
    mod restarts;
    mod run_args;
    mod sbatch;
    mod schedule;
    mod signals;
    mod slurm;
    mod started;
    mod suggestions;
    mod torch_environment;
    mod torch_gloo;
    mod torch_nodes;
    mod train;
    mod two_hosts;
    mod vscode;
    mod watch;
}
