//! Simulated hosts from network namespaces: several machines on this one, with cables that can be cut.
//!
//! ```text
//!   host 0 (10.77.0.1) eth0 ──── port0 ┐
//!   host 1 (10.77.0.2) eth0 ──── port1 ┴ bridge, in its own namespace; nothing appears in the machine's network
//! ```
//!
//! Or two hosts in a line with a third one that has the address of each towards the other. What one host sends the other
//! ends at the third, which may pass it on, changed or not:
//!
//! ```text
//!   host 0 (10.77.0.1) eth0 ──── port0 (10.77.0.2) host 2 (10.77.0.1) port1 ──── eth0 (10.77.0.2) host 1
//! ```
//!
//! A cut takes down the port on the bridge's side: packets vanish, as with a pulled cable, and no side is notified.
//! Each host also has its own host name. Needs root, `ip` and `unshare`. What a killed test has left is removed by the
//! next one.

use std::ffi::OsString;
use std::fs;
use std::net::Ipv4Addr;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rustix::process::Pid;

use crate::{leftovers, tools};

/// Namespaces are named PREFIX-PID-NUMBER-…, with the pid of the test that created them.
const PREFIX: &str = "rank-test";

/// Sets the host name of a new UTS namespace to the first argument, and executes the rest.
const WITH_HOST_NAME: &str = r#"echo "$0" >/proc/sys/kernel/hostname && exec "$@""#;

/// Hosts that can reach each other and nothing else. Removed when dropped.
#[derive(Debug)]
pub struct Hosts {
    base: String,
    num_hosts: usize,
}

impl Hosts {
    /// Creates `num_hosts` hosts (1 to 200); `None`, with a `SKIPPED: …` line, if this machine cannot.
    pub fn new(num_hosts: usize) -> Result<Option<Self>> {
        ensure!((1..=200).contains(&num_hosts), "1 to 200 hosts can be created, got {num_hosts}");
        Self::built(num_hosts, Self::build)
    }

    /// Creates hosts 0 and 1, and host 2 between them: a connection from either to the other ends there. A connection from
    /// host 2 to one of them must begin at the address of the other one. `None` as for [`new`](Self::new).
    pub fn with_one_between() -> Result<Option<Self>> {
        Self::built(3, Self::build_line)
    }

    fn built(num_hosts: usize, build: impl FnOnce(&Self) -> Result<()>) -> Result<Option<Self>> {
        if !tools::require_tool("ip") || !tools::require_tool("unshare") {
            return Ok(None);
        }
        if !Command::new("unshare").args(["--net", "--uts", "true"]).output()?.status.success() {
            tools::skipped("this user may not create network namespaces; try root");
            return Ok(None);
        }
        // One at a time: `ip` sets up the folder of namespaces when it creates the first one.
        static COUNT: Mutex<u32> = Mutex::new(0);
        let mut count = COUNT.lock().unwrap_or_else(PoisonError::into_inner);
        let number = *count;
        *count += 1;
        remove_stale();
        let hosts = Self { base: format!("{PREFIX}-{}-{number}", std::process::id()), num_hosts };
        build(&hosts)?;
        Ok(Some(hosts))
    }

    fn build_line(&self) -> Result<()> {
        let between = self.name(2);
        ip(&["netns", "add", &between])?;
        ip(&["-n", &between, "link", "set", "lo", "up"])?;
        for host in 0..2 {
            let (port, own, other) = (port(host), self.address(host).to_string(), self.address(1 - host));
            self.build_end(host, &between)?;
            ip(&["-n", &between, "address", "add", &format!("{other}/32"), "dev", &port])?;
            ip(&["-n", &between, "link", "set", &port, "up"])?;
            // Both addresses are its own and those of others: what comes in is for itself, what goes out is for the others.
            let accept = format!("echo 1 >/proc/sys/net/ipv4/conf/{port}/accept_local");
            ip(&["netns", "exec", &between, "sh", "-c", &accept])?;
            ip(&["-n", &between, "rule", "add", "pref", "10", "iif", &port, "lookup", "local"])?;
            ip(&["-n", &between, "route", "add", &own, "dev", &port, "table", "100"])?;
        }
        let ours = "10.77.0.0/24";
        ip(&["-n", &between, "rule", "add", "pref", "20", "from", ours, "to", ours, "lookup", "100"])?;
        ip(&["-n", &between, "rule", "add", "pref", "100", "lookup", "local"])?;
        ip(&["-n", &between, "rule", "delete", "pref", "0"])
    }

    fn build(&self) -> Result<()> {
        let switch = self.switch();
        ip(&["netns", "add", &switch])?;
        ip(&["-n", &switch, "link", "add", "bridge", "type", "bridge"])?;
        ip(&["-n", &switch, "link", "set", "bridge", "up"])?;
        (0..self.num_hosts).try_for_each(|host| self.build_host(host))
    }

    fn build_host(&self, host: usize) -> Result<()> {
        let switch = self.switch();
        self.build_end(host, &switch)?;
        ip(&["-n", &switch, "link", "set", &port(host), "master", "bridge", "up"])
    }

    /// A host and its cable, whose other end is in the namespace `there`.
    fn build_end(&self, host: usize, there: &str) -> Result<()> {
        let (name, port) = (self.name(host), port(host));
        let address = format!("{}/24", self.address(host));
        ip(&["netns", "add", &name])?;
        ip(&["link", "add", "eth0", "netns", &name, "type", "veth", "peer", "name", &port, "netns", there])?;
        ip(&["-n", &name, "address", "add", &address, "dev", "eth0"])?;
        ip(&["-n", &name, "link", "set", "eth0", "up"])?;
        ip(&["-n", &name, "link", "set", "lo", "up"])
    }

    /// How many hosts there are.
    pub fn num_hosts(&self) -> usize {
        self.num_hosts
    }

    /// A host's address: 10.77.0.1 for the first.
    pub fn address(&self, host: usize) -> Ipv4Addr {
        Ipv4Addr::new(10, 77, 0, host as u8 + 1)
    }

    /// What to put before a command line to run it on a host. The started process is the command itself.
    pub fn prefix(&self, host: usize) -> Vec<OsString> {
        let name = self.name(host);
        let host_name = format!("host{host}");
        let words =
            ["ip", "netns", "exec", &name, "unshare", "--uts", "--", "sh", "-c", WITH_HOST_NAME, &host_name];
        words.map(OsString::from).to_vec()
    }

    /// A command that runs on a host.
    pub fn command(&self, host: usize, program: &str) -> Command {
        let prefix = self.prefix(host);
        let mut command = Command::new(&prefix[0]);
        command.args(&prefix[1..]).arg(program);
        command
    }

    /// Pulls a host's cable: messages from it and to it are lost.
    pub fn cut(&self, host: usize) -> Result<()> {
        ip(&["-n", &self.switch(), "link", "set", &port(host), "down"])
    }

    /// Plugs the cable in again.
    pub fn restore(&self, host: usize) -> Result<()> {
        ip(&["-n", &self.switch(), "link", "set", &port(host), "up"])
    }

    /// An outage: pulls a host's cable, and plugs it in again after `span`.
    pub fn outage(&self, host: usize, span: Duration) -> Result<()> {
        self.cut(host)?;
        std::thread::sleep(span);
        self.restore(host)
    }

    /// The processes that run on a host.
    pub fn pids(&self, host: usize) -> Vec<Pid> {
        let output = Command::new("ip").args(["netns", "pids", &self.name(host)]).output();
        let text = output.map(|output| output.stdout).unwrap_or_default();
        let number = |line: &str| Pid::from_raw(line.trim().parse().ok()?);
        String::from_utf8_lossy(&text).lines().filter_map(number).collect()
    }

    /// The TCP ports that processes on a host listen on, as `tcp port N`.
    pub fn listening(&self, host: usize) -> Vec<String> {
        let table = |name: &str| {
            let output = self.command(host, "cat").arg(format!("/proc/net/{name}")).output();
            String::from_utf8_lossy(&output.map(|output| output.stdout).unwrap_or_default()).into_owned()
        };
        let ports = ["tcp", "tcp6"].map(|name| leftovers::listening(&table(name))).concat();
        ports.into_iter().map(|(_, port)| port).collect()
    }

    fn name(&self, host: usize) -> String {
        format!("{}-{host}", self.base)
    }

    fn switch(&self) -> String {
        format!("{}-switch", self.base)
    }
}

/// Whoever started the processes inside must end them; the network ends with the last of them.
impl Drop for Hosts {
    fn drop(&mut self) {
        let names = (0..self.num_hosts).map(|host| self.name(host)).chain([self.switch()]);
        // A namespace that could not be created cannot be removed.
        names.for_each(|name| drop(ip(&["netns", "delete", &name])));
    }
}

/// The bridge's end of a host's cable.
fn port(host: usize) -> String {
    format!("port{host}")
}

fn ip(args: &[&str]) -> Result<()> {
    let Output { status, stderr, .. } = Command::new("ip").args(args).output().context("cannot run `ip`")?;
    if !status.success() {
        bail!("`ip {}` failed: {}", args.join(" "), String::from_utf8_lossy(&stderr).trim_end());
    }
    Ok(())
}

/// Removes the namespaces of tests that have ended.
fn remove_stale() {
    let entries = fs::read_dir("/run/netns").into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| creator_has_ended(name)).for_each(|name| drop(ip(&["netns", "delete", &name])));
}

fn creator_has_ended(name: &str) -> bool {
    let creator = || name.strip_prefix(PREFIX)?.strip_prefix('-')?.split('-').next()?.parse::<u32>().ok();
    creator().is_some_and(|pid| !Path::new("/proc").join(pid.to_string()).exists())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_namespaces_of_dead_tests_are_stale() {
        assert!(!creator_has_ended(&format!("rank-test-{}-0-1", std::process::id())));
        assert!(creator_has_ended("rank-test-4194305-0-switch"), "no pid is that high");
        assert!(!creator_has_ended("rank-test-x-0"));
        assert!(!creator_has_ended("somebody-4194305-0"));
    }
}
