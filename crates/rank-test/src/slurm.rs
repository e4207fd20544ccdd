//! Runs a real Slurm of two nodes for the duration of a test.
//!
//! ```text
//!   host0: login node, munged, slurmctld ──┐
//!   host1: slurmd                          ├─ hosts of `netns`, with names
//!   host2: slurmd                          ┘
//! ```
//! All of it runs in network namespaces and in one folder: several can run in parallel, and none affects a Slurm of the
//! machine. They still run one at a time, because the machine has a limited number of cores. Needs root.

use std::ffi::OsString;
use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};

use crate::netns::Hosts;
use crate::tools;

/// The programs that must be installed.
const TOOLS: [&str; 9] =
    ["munged", "mungekey", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "setpriv", "sinfo"];
/// The hosts of the login node, and of the nodes that run jobs.
const LOGIN: usize = 0;
const NODES: [usize; 2] = [1, 2];
/// The number of cores that each node claims to have, whatever the machine has.
const CORES: usize = 4;
const START_WITHIN: Duration = Duration::from_secs(60);
const STOP_WITHIN: Duration = Duration::from_secs(10);
const TICK: Duration = Duration::from_millis(20);

/// Gives a host its own /etc/hosts, which is the first argument, and executes the rest. `ip netns exec` has given the
/// process its own mounts.
const WITH_NAMES: &str = r#"mount --bind "$0" /etc/hosts && exec "$@""#;

/// A Slurm whose two nodes are idle. Dropping it ends all its jobs and daemons.
#[derive(Debug)]
pub struct Slurm {
    daemons: Vec<Child>,
    hosts: Hosts,
    folder: Folder,
    // Dropped last: the next Slurm may start when all of this is gone.
    _turn: File,
}

impl Slurm {
    /// Starts one; `None`, with a `SKIPPED: …` line, if this machine cannot.
    pub fn new() -> Result<Option<Self>> {
        if !TOOLS.iter().all(|tool| tools::require_tool(tool)) {
            return Ok(None);
        }
        let turn = File::create(std::env::temp_dir().join("rank-test-slurm.lock"))?;
        turn.lock().context("cannot wait for another test's Slurm")?;
        let Some(hosts) = Hosts::new(1 + NODES.len())? else { return Ok(None) };
        let mut slurm = Self { daemons: Vec::new(), hosts, folder: Folder::new()?, _turn: turn };
        slurm.configure()?;
        slurm.start().with_context(|| slurm.logs())?;
        Ok(Some(slurm))
    }

    /// A command that runs on the login node.
    pub fn command(&self, program: &str) -> Command {
        let mut command = self.on(LOGIN);
        command.arg(program);
        command
    }

    /// A folder that all nodes share.
    pub fn folder(&self) -> &Path {
        &self.folder.0
    }

    /// The logs of the daemons.
    pub fn logs(&self) -> String {
        let files = fs::read_dir(self.path("log")).into_iter().flatten().flatten();
        let text = |path: PathBuf| format!("---- {}\n{}", path.display(), read(&path));
        files.map(|file| text(file.path())).collect()
    }

    fn configure(&self) -> Result<()> {
        for name in ["munge", "log", "state"] {
            fs::create_dir(self.path(name))?;
        }
        let names =
            (0..self.hosts.num_hosts()).map(|host| format!("{} host{host}\n", self.hosts.address(host)));
        fs::write(self.path("hosts"), names.collect::<String>() + "127.0.0.1 localhost\n")?;
        fs::write(self.path("slurm.conf"), self.configuration())?;
        // `ip netns exec` mounts a /sys without cgroups, in which slurmd would look for their version.
        fs::write(self.path("cgroup.conf"), "CgroupPlugin=cgroup/v1\n")?;
        let key = self.path("munge/key");
        succeed(Command::new("mungekey").args(["--create", "--keyfile"]).arg(key))?;
        succeed(Command::new("chown").args(["-R", "munge:munge"]).arg(self.path("munge")))
    }

    fn configuration(&self) -> String {
        let folder = self.folder.0.display();
        let nodes = NODES.map(|host| {
            let address = self.hosts.address(host);
            format!("NodeName=host{host} NodeAddr={address} Port=6818 CPUs={CORES} Sockets=1 CoresPerSocket={CORES} ThreadsPerCore=1\n")
        });
        format!(
            "ClusterName=test\n\
             SlurmctldHost=host{LOGIN}({login})\n\
             SlurmUser=root\n\
             AuthType=auth/munge\n\
             AuthInfo=socket={folder}/munge/socket,cred_expire=5\n\
             MpiDefault=none\n\
             ProctrackType=proctrack/linuxproc\n\
             TaskPlugin=task/none\n\
             SwitchType=switch/none\n\
             SelectType=select/cons_tres\n\
             SelectTypeParameters=CR_Core\n\
             SlurmdParameters=config_overrides\n\
             SchedulerParameters=sched_min_interval=0,batch_sched_delay=0,sched_interval=1,bf_interval=1\n\
             ReturnToService=2\n\
             KillWait=5\n\
             InactiveLimit=0\n\
             JobRequeue=1\n\
             StateSaveLocation={folder}/state\n\
             SlurmdSpoolDir={folder}/spool-%n\n\
             SlurmctldPidFile={folder}/slurmctld.pid\n\
             SlurmdPidFile={folder}/slurmd-%n.pid\n\
             {nodes}\
             PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n",
            login = self.hosts.address(LOGIN),
            nodes = nodes.concat(),
        )
    }

    fn start(&mut self) -> Result<()> {
        let deadline = Instant::now() + START_WITHIN;
        let munge = |name: &str| self.path("munge").join(name);
        let [key, socket, log, pid, seed] = ["key", "socket", "log", "pid", "seed"].map(munge);
        let mut munged = self.on(LOGIN);
        munged.args(["setpriv", "--reuid=munge", "--regid=munge", "--clear-groups"]);
        munged.args(["--pdeathsig", "KILL", "munged", "--foreground"]);
        for (option, path) in [
            ("--key-file", &key),
            ("--socket", &socket),
            ("--log-file", &log),
            ("--pid-file", &pid),
            ("--seed-file", &seed),
        ] {
            munged.arg(option).arg(path);
        }
        self.spawn(munged, "munged")?;
        wait_until(deadline, "munged does not listen", || Ok(socket.exists()))?;
        self.daemon(LOGIN, &["slurmctld", "-D"])?;
        for host in NODES {
            self.daemon(host, &["slurmd", "-D", "-N", &format!("host{host}")])?;
        }
        wait_until(deadline, "the nodes are not idle", || self.are_idle())
    }

    /// Starts a daemon that ends with this test, even if nothing is dropped.
    fn daemon(&mut self, host: usize, command: &[&str]) -> Result<()> {
        let mut daemon = self.on(host);
        daemon.args(["setpriv", "--pdeathsig", "KILL"]).args(command);
        self.spawn(daemon, &format!("{}-{host}", command[0]))
    }

    fn spawn(&mut self, mut command: Command, name: &str) -> Result<()> {
        let stderr = File::create(self.path("log").join(format!("{name}.stderr")))?;
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr).spawn();
        self.daemons.push(child.with_context(|| format!("cannot start {name}"))?);
        Ok(())
    }

    fn are_idle(&self) -> Result<bool> {
        let output = self.command("sinfo").args(["--noheader", "--Node", "--format=%T"]).output()?;
        let states = String::from_utf8_lossy(&output.stdout).into_owned();
        Ok(states.lines().count() == NODES.len() && states.lines().all(|state| state.trim() == "idle"))
    }

    fn on(&self, host: usize) -> Command {
        let names = self.path("hosts").into_os_string();
        let mut words = self.hosts.prefix(host);
        words.extend(["sh", "-c", WITH_NAMES].map(OsString::from).into_iter().chain([names]));
        let mut command = Command::new(&words[0]);
        // Inside another Slurm job, its variables would affect ours.
        let inherited = std::env::vars_os().map(|(name, _)| name);
        inherited.filter(|name| name.to_string_lossy().starts_with("SLURM")).for_each(|name| {
            command.env_remove(name);
        });
        command.args(&words[1..]).env("SLURM_CONF", self.path("slurm.conf")).current_dir(self.folder());
        command
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.0.join(name)
    }

    /// All processes in the namespaces; all of them are ours.
    fn processes(&self) -> Vec<Pid> {
        (0..self.hosts.num_hosts()).flat_map(|host| self.hosts.pids(host)).collect()
    }

    fn kill_all(&self) {
        let deadline = Instant::now() + STOP_WITHIN;
        while Instant::now() < deadline {
            let left = self.processes();
            if left.is_empty() {
                return;
            }
            for pid in left {
                // It may have ended by itself.
                let _ = kill_process(pid, Signal::KILL);
            }
            sleep(TICK);
        }
    }
}

/// Ends the jobs first, then the daemons, then whatever is left.
impl Drop for Slurm {
    fn drop(&mut self) {
        let _ = self.command("scancel").args(["--quiet", "--user=root"]).output();
        let deadline = Instant::now() + STOP_WITHIN;
        while Instant::now() < deadline && !self.are_idle().unwrap_or(true) {
            sleep(TICK);
        }
        for daemon in self.daemons.iter_mut().rev() {
            end(daemon, Instant::now() + STOP_WITHIN);
        }
        self.kill_all();
        for daemon in &mut self.daemons {
            // Already reaped, or just killed.
            let _ = daemon.wait();
        }
    }
}

/// Sends SIGTERM, and waits until the deadline.
fn end(daemon: &mut Child, deadline: Instant) {
    let is_over = |daemon: &mut Child| matches!(daemon.try_wait(), Ok(Some(_)));
    if let Some(pid) = Pid::from_raw(daemon.id().cast_signed()).filter(|_| !is_over(daemon)) {
        // It is not reaped yet, so the pid is still its own.
        let _ = kill_process(pid, Signal::TERM);
    }
    while Instant::now() < deadline && !is_over(daemon) {
        sleep(TICK);
    }
}

/// A new folder that all users may enter; removed when dropped.
#[derive(Debug)]
struct Folder(PathBuf);

impl Folder {
    fn new() -> Result<Self> {
        let made =
            Command::new("mktemp").args(["--directory", "--tmpdir", "rank-test-slurm.XXXXXX"]).output()?;
        ensure!(made.status.success(), "cannot create a folder: {}", String::from_utf8_lossy(&made.stderr));
        let path = PathBuf::from(String::from_utf8(made.stdout)?.trim_end());
        fs::set_permissions(&path, Permissions::from_mode(0o755))?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn wait_until(deadline: Instant, otherwise: &str, mut done: impl FnMut() -> Result<bool>) -> Result<()> {
    while !done()? {
        if Instant::now() >= deadline {
            bail!("{otherwise} in {START_WITHIN:?}");
        }
        sleep(TICK);
    }
    Ok(())
}

fn succeed(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    ensure!(output.status.success(), "{command:?} failed: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

fn read(path: &Path) -> String {
    String::from_utf8_lossy(&fs::read(path).unwrap_or_default()).into_owned()
}
