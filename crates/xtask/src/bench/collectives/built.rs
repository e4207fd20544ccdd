//! The programs that take part. What cannot be built is reported and left out, and the rest is still measured.

use super::contenders::Peer;
use crate::bench::build::{self, compile};
use crate::{python, workspace};
use std::path::PathBuf;

/// The programs that are there.
#[derive(Debug, Default)]
pub(crate) struct Built {
    pub(crate) ours: Option<PathBuf>,
    pub(crate) open_mpi: Option<PathBuf>,
    pub(crate) mpich: Option<PathBuf>,
    pub(crate) floor: Option<PathBuf>,
    pub(crate) socket: Option<PathBuf>,
    pub(crate) meter: Option<PathBuf>,
    pub(crate) python: Option<PathBuf>,
    pub(crate) gloo_script: PathBuf,
    /// What could not be built, and why.
    pub(crate) missing: Vec<String>,
}

/// Builds the peers asked for, the floor in any case (it is the probe too), and ours if wanted.
pub(crate) fn build(peers: &[Peer], with_ours: bool) -> Built {
    let mut missing = Vec::new();
    let mut part = |name: &str, wanted: bool, made: &dyn Fn() -> anyhow::Result<PathBuf>| {
        let made = wanted.then(made)?;
        made.inspect_err(|error| missing.push(format!("{name}: {error:#}"))).ok()
    };
    let wants = |peer| peers.contains(&peer);
    let mpi = ["mpi_collectives.c", "meter.c"];
    Built {
        floor: part("floor", true, &|| compile("cc", "floor", &[], &["floor.c", "meter.c"])),
        open_mpi: part("openmpi", wants(Peer::OpenMpi), &|| {
            compile("mpicc.openmpi", "collectives-openmpi", &[], &mpi)
        }),
        mpich: part("mpich", wants(Peer::Mpich), &|| compile("mpicc.mpich", "collectives-mpich", &[], &mpi)),
        socket: part("socket", wants(Peer::Socket), &|| {
            compile("cc", "socket_pair", &[], &["socket_pair.c", "meter.c"])
        }),
        meter: part("gloo", wants(Peer::Gloo), &|| {
            compile("cc", "libmeter.so", &["-shared", "-fPIC"], &["meter.c"])
        }),
        python: part("gloo", wants(Peer::Gloo), &python::with_torch),
        ours: part("ours", with_ours, &build::drumline),
        gloo_script: workspace::root().join("bench/peers/gloo_collectives.py"),
        missing,
    }
}
