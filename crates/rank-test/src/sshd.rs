//! A real `sshd` with its own keys, for tests that start something on another host.
//!
//! ```text
//!   Ssh (a folder: host key, user's key, known hosts) ─serve─▶ Sshd on a host's address ◀─ ssh with client_args()
//! ```
//! The machine's own configuration, keys and services are neither read nor changed.

use std::ffi::OsString;
use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use tempfile::TempDir;

use crate::tools;

/// The port on which every [`Sshd`] listens, on its own address.
pub const PORT: u16 = 22_022;

/// `sshd` needs this folder for privilege separation; normally the service's start script creates it.
const EMPTY_FOLDER: &str = "/run/sshd";

/// Keys for any number of servers and their one user.
#[derive(Debug)]
pub struct Ssh {
    folder: TempDir,
    server: PathBuf,
}

/// A running server, killed when dropped. What it has started ends with the client that requested it.
#[derive(Debug)]
pub struct Sshd {
    child: Child,
}

impl Ssh {
    /// Creates keys; `None`, with a `SKIPPED: …` line, if this machine cannot.
    pub fn new() -> Result<Option<Self>> {
        if !["ssh", "ssh-keygen", "sshd"].into_iter().all(tools::require_tool) {
            return Ok(None);
        }
        if fs::create_dir_all(EMPTY_FOLDER).is_err() {
            tools::skipped(&format!("this user may not create {EMPTY_FOLDER}; try root"));
            return Ok(None);
        }
        // It executes itself again for each connection, for which it needs its full path.
        let server = tools::find("sshd").context("sshd is gone")?;
        let ssh = Self { folder: TempDir::with_prefix("rank-test-ssh")?, server };
        ["host_key", "user_key"].into_iter().try_for_each(|name| ssh.make_key(name))?;
        fs::copy(ssh.path("user_key.pub"), ssh.path("authorized_keys"))?;
        Ok(Some(ssh))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn make_key(&self, name: &str) -> Result<()> {
        let made = Command::new("ssh-keygen")
            .args(["-q", "-t", "ed25519", "-N", "", "-f"])
            .arg(self.path(name))
            .stdin(Stdio::null())
            .output()?;
        ensure!(made.status.success(), "ssh-keygen failed: {}", String::from_utf8_lossy(&made.stderr));
        Ok(())
    }

    /// Starts a server for `address`; `prefix` comes before its command line, to start it on another host.
    pub fn serve(&self, prefix: &[OsString], address: IpAddr) -> Result<Sshd> {
        let config = self.path(&format!("config-{address}"));
        fs::write(&config, self.config(address))?;
        self.know(address)?;
        let mut words = prefix.to_vec();
        words.extend([self.server.clone().into(), "-D".into(), "-e".into(), "-f".into(), config.into()]);
        let log = self.path(&format!("log-{address}"));
        let child = Command::new(&words[0])
            .args(&words[1..])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(fs::File::create(&log)?)
            .spawn()
            .context("cannot start sshd")?;
        let mut sshd = Sshd { child };
        sshd.wait_until_it_listens(&log)?;
        Ok(sshd)
    }

    fn config(&self, address: IpAddr) -> String {
        let path = |name| self.path(name).display().to_string();
        [
            format!("ListenAddress {address}"),
            format!("Port {PORT}"),
            format!("HostKey {}", path("host_key")),
            format!("AuthorizedKeysFile {}", path("authorized_keys")),
            // The folder of keys is in a folder that all may write to.
            "StrictModes no".to_string(),
            "PidFile none".to_string(),
            "UsePAM no".to_string(),
            "PasswordAuthentication no".to_string(),
            "KbdInteractiveAuthentication no".to_string(),
            "PermitRootLogin prohibit-password".to_string(),
            "UseDNS no".to_string(),
        ]
        .map(|line| line + "\n")
        .concat()
    }

    fn know(&self, address: IpAddr) -> Result<()> {
        let key = fs::read_to_string(self.path("host_key.pub"))?;
        let known = self.path("known_hosts");
        let before = fs::read_to_string(&known).unwrap_or_default();
        Ok(fs::write(known, format!("{before}[{address}]:{PORT} {key}"))?)
    }

    /// The arguments with which `ssh` reaches these servers, and no others.
    pub fn client_args(&self) -> Vec<String> {
        let path = |name| self.path(name).display().to_string();
        vec![
            "-Fnone".to_string(),
            format!("-i{}", path("user_key")),
            "-oIdentitiesOnly=yes".to_string(),
            "-oIdentityAgent=none".to_string(),
            "-oStrictHostKeyChecking=yes".to_string(),
            "-oGlobalKnownHostsFile=none".to_string(),
            format!("-oUserKnownHostsFile={}", path("known_hosts")),
        ]
    }
}

impl Sshd {
    fn wait_until_it_listens(&mut self, log: &Path) -> Result<()> {
        let begin = Instant::now();
        loop {
            let output = fs::read_to_string(log)?;
            if output.contains("Server listening on") {
                return Ok(());
            }
            if let Some(status) = self.child.try_wait()? {
                bail!("sshd ended with {status}: {output}");
            }
            ensure!(begin.elapsed() < Duration::from_secs(20), "sshd does not listen: {output}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Sshd {
    fn drop(&mut self) {
        let _ = self.child.kill().and_then(|()| self.child.wait());
    }
}
