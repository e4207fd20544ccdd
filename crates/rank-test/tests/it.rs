//! Tests of `rank-test` itself.
#![allow(clippy::unwrap_used)]

mod it {
    mod bodies;
    mod faults;
    mod hosts;
    mod meeting;
    mod skipping;
    mod slurm;
    mod sshd;
}
