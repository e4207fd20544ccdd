//! What a plan must know about this node. It is gathered once; planning itself reads nothing.

use std::ffi::OsString;
use std::net::{IpAddr, UdpSocket};
use std::path::Path;
use std::thread::available_parallelism;

use drumline_launch::placing::cpus_of_the_machine;
use drumline_launch::{installed_gpus, visible_gpus};
use drumline_rendezvous::worker_env;

use super::error::PlanError;

/// This node, as far as a plan needs it.
pub(crate) struct Host<'a> {
    pub(super) name: String,
    pub(super) cores: usize,
    /// Whether an address belongs to this node.
    pub(super) has_address: fn(IpAddr) -> bool,
    /// The names of the device files.
    pub(super) device_files: Vec<String>,
    pub(super) env: &'a dyn Fn(&str) -> Option<OsString>,
    /// The content of the file of `--hostfile`, if one was given.
    pub(super) hostfile: Option<String>,
    /// This program, as it can be started again.
    pub(super) launcher: OsString,
    /// A name for a job that was given none. It is never used twice.
    pub(super) fresh_id: String,
}

impl<'a> Host<'a> {
    /// The node on which this process runs.
    pub(super) fn found(
        hostfile: Option<&Path>,
        env: &'a dyn Fn(&str) -> Option<OsString>,
    ) -> Result<Self, PlanError> {
        let read = |path: &Path| {
            let wrong = |source| PlanError::Hostfile { path: path.to_path_buf(), source };
            std::fs::read_to_string(path).map_err(wrong)
        };
        let cores = cpus_of_the_machine().or_else(|| available_parallelism().ok().map(usize::from));
        Ok(Self {
            name: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            cores: cores.unwrap_or(1),
            // Only an own address can be bound.
            has_address: |address| UdpSocket::bind((address, 0)).is_ok(),
            device_files: names_in("/dev"),
            env,
            hostfile: hostfile.map(read).transpose()?,
            launcher: std::env::current_exe().map_or_else(|_| "drumline".into(), Into::into),
            fresh_id: fresh_id(),
        })
    }

    pub(super) fn text(&self, name: &str) -> Option<String> {
        (self.env)(name).map(|value| value.to_string_lossy().into_owned())
    }

    /// The GPUs that a program here would see.
    pub(super) fn gpus(&self) -> Vec<String> {
        visible_gpus(self.installed(), self.text(worker_env::CUDA_VISIBLE_DEVICES).as_deref())
    }

    fn installed(&self) -> usize {
        installed_gpus(self.device_files.iter().map(String::as_str))
    }

    /// Whether a host with this name in a list is this node: by its name, or by an address that it has.
    pub(super) fn is_called(&self, name: &str) -> bool {
        let short = |name: &str| name.split('.').next().unwrap_or_default().to_string();
        let known =
            ["localhost", "127.0.0.1", self.name.as_str()].contains(&name) || short(&self.name) == name;
        known || name.parse().is_ok_and(|address| (self.has_address)(address))
    }

    pub(super) fn why_no_gpu(&self) -> String {
        match (self.installed(), self.text(worker_env::CUDA_VISIBLE_DEVICES)) {
            (0, _) | (_, None) => "this node has none".to_string(),
            (count, Some(list)) => format!("CUDA_VISIBLE_DEVICES is `{list}` and hides all {count}"),
        }
    }
}

fn names_in(folder: &str) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

fn fresh_id() -> String {
    let mut bytes = [0_u8; 16];
    // Early in the boot the kernel may have no randomness. Then the name still differs from all others on this machine.
    if rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()).is_err() {
        bytes[..4].copy_from_slice(&std::process::id().to_ne_bytes());
    }
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
