//! Ranks that share a GPU communicate through host memory by default. `DRUMLINE_SHARED_GPU=nccl` makes them use NCCL, to
//! test and compare on one GPU what runs on several.
//!
//! NCCL refuses two ranks of one host on one GPU. A host id for each process makes them ranks of different hosts, which
//! communicate by sockets on loopback.
#![allow(unsafe_code)]

use crate::error::TorchError;

/// The variable that chooses.
const VARIABLE: &str = "DRUMLINE_SHARED_GPU";

/// How ranks that share a GPU communicate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SharedGpu {
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
            None | Some("" | "host") => Ok(Self::Host),
            Some("nccl") => Ok(Self::Nccl),
            Some(other) => Err(TorchError::value(VARIABLE, format!("`{other}`"), "`host` or `nccl`")),
        }
    }

    /// Settings of NCCL, which must be made before it is opened. Settings of the user stay.
    pub(crate) fn prepare(self) {
        if self == Self::Host {
            return;
        }
        let id = format!("drumline-{}", std::process::id());
        for (name, value) in [("NCCL_HOSTID", id.as_str()), ("NCCL_SOCKET_IFNAME", "lo"), ("NCCL_IB_DISABLE", "1")] {
            if std::env::var_os(name).is_none() {
                // SAFETY: this runs once, before NCCL starts threads of its own. Other threads of this program read the
                // environment through Rust's lock; libtorch reads its variables when it is loaded, which was before.
                unsafe { std::env::set_var(name, value) };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_that_means_nothing_is_an_error_that_lists_those_that_do() {
        assert_eq!(SharedGpu::parse(None).unwrap(), SharedGpu::Host);
        assert_eq!(SharedGpu::parse(Some("nccl")).unwrap(), SharedGpu::Nccl);
        let error = SharedGpu::parse(Some("ipc")).unwrap_err().to_string();
        assert!(error.contains("`ipc`") && error.contains("`host` or `nccl`"), "{error}");
    }
}
