//! Ranks that share a GPU read each other's memory there by default. `DRUMLINE_SHARED_GPU=nccl` makes them use NCCL, to
//! test and compare on one GPU what runs on several, and `host` makes them communicate through host memory.
//!
//! NCCL refuses two ranks of one host on one GPU. A host id for each process makes them ranks of different hosts, which
//! communicate by sockets on loopback. Launchers set it: a process that has started cannot change its environment safely.

use crate::error::TorchError;

/// The variable that chooses.
const VARIABLE: &str = "DRUMLINE_SHARED_GPU";

/// By which NCCL tells hosts apart.
const HOST_ID: &str = "NCCL_HOSTID";

/// How ranks that share a GPU communicate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SharedGpu {
    /// By CUDA IPC; through host memory where that does not work.
    Ipc,
    /// In pieces through host memory.
    Host,
    Nccl,
}

impl SharedGpu {
    pub(crate) fn from_env() -> Result<Self, TorchError> {
        Self::parse(std::env::var(VARIABLE).ok().as_deref())
    }

    fn parse(value: Option<&str>) -> Result<Self, TorchError> {
        match value {
            None | Some("" | "ipc") => Ok(Self::Ipc),
            Some("host") => Ok(Self::Host),
            Some("nccl") => Ok(Self::Nccl),
            Some(other) => Err(TorchError::value(VARIABLE, format!("`{other}`"), "`ipc`, `host` or `nccl`")),
        }
    }

    /// An error if NCCL could not be used, because the process was started without its settings.
    pub(crate) fn check(self) -> Result<(), TorchError> {
        if self == Self::Nccl && std::env::var_os(HOST_ID).is_none() {
            let expected = "another one for each rank, with NCCL_SOCKET_IFNAME=lo and NCCL_IB_DISABLE=1, for \
                            DRUMLINE_SHARED_GPU=nccl; try drumline run, which sets them";
            return Err(TorchError::value(HOST_ID, "not set", expected));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_that_means_nothing_is_an_error_that_lists_those_that_do() {
        assert_eq!(SharedGpu::parse(None).unwrap(), SharedGpu::Ipc);
        assert_eq!(SharedGpu::parse(Some("host")).unwrap(), SharedGpu::Host);
        assert_eq!(SharedGpu::parse(Some("nccl")).unwrap(), SharedGpu::Nccl);
        let error = SharedGpu::parse(Some("mps")).unwrap_err().to_string();
        assert!(error.contains("`mps`") && error.contains("`ipc`, `host` or `nccl`"), "{error}");
    }
}
