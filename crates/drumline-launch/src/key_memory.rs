//! Passes the job key to workers in inherited memory: a sealed memfd whose number is in a variable.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use drumline_rendezvous::{JobKey, worker_env};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

use crate::LaunchError;
use crate::environment::Environment;

/// A job key that workers inherit.
#[derive(Debug, Clone)]
pub struct KeyMemory(Arc<OwnedFd>);

impl KeyMemory {
    /// Puts `key` into memory that cannot be changed.
    pub fn new(key: &JobKey) -> Result<Self, LaunchError> {
        Self::write(key).map_err(LaunchError::system("put the job key in memory"))
    }

    fn write(key: &JobKey) -> rustix::io::Result<Self> {
        let fd = memfd_create("drumline-job-key", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::io::pwrite(&fd, key.as_bytes(), 0)?;
        fcntl_add_seals(&fd, SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok(Self(Arc::new(fd)))
    }

    /// The descriptor, for [`WorkerSpec::kept`](crate::WorkerSpec).
    pub fn descriptor(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.0)
    }

    /// The variable that names the descriptor for a worker; the name of an inherited key file is removed.
    pub fn environment(&self) -> Environment {
        let number = self.0.as_raw_fd().to_string();
        vec![
            (worker_env::DRUMLINE_JOB_KEY_FD.into(), Some(number.into())),
            (worker_env::DRUMLINE_JOB_KEY_FILE.into(), None),
        ]
    }
}
