//! Finds out whether the kernel killed a worker for lack of memory. SIGKILL alone does not say.
//!
//! ```text
//!   start: count of kills in the workers' memory cgroup, end of the kernel log ─▶ … SIGKILL ends a worker …
//!   ─▶ does the log name its pid? has the count grown? ─▶ OomKill { limit, held, together }
//! ```
//!
//! Workers run in the launcher's own cgroup. The count is for the whole cgroup: if the log cannot be read, a
//! simultaneous kill of another process there would be mistaken for this one.

use std::fmt;
use std::path::{Path, PathBuf};

use super::kernel_log::KernelLog;
use super::small_file::read_small;

/// A kill by the kernel for lack of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OomKill {
    /// The limit of the worker's cgroup, in bytes; `None` if only the machine's memory limits it.
    pub limit: Option<u64>,
    /// What the worker itself held, in bytes, if the kernel log says so.
    pub held: Option<u64>,
    /// The most that all processes of its cgroup held together, in bytes.
    pub together: Option<u64>,
}

impl fmt::Display for OomKill {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("out of memory: ")?;
        match (self.limit, self.together) {
            (None, _) => f.write_str("the machine had none left")?,
            (Some(limit), None) => write!(f, "the limit is {}", Bytes(limit))?,
            (Some(limit), Some(together)) => {
                write!(
                    f,
                    "the limit is {}, all processes together held up to {}",
                    Bytes(limit),
                    Bytes(together)
                )?;
            }
        }
        self.held.map_or(Ok(()), |held| write!(f, ", this one {}", Bytes(held)))
    }
}

/// A number of bytes in a readable unit.
struct Bytes(u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
        match units.into_iter().find(|(_, shift)| self.0 >> shift > 0) {
            Some((unit, shift)) => write!(f, "{:.1} {unit}", self.0 as f64 / (1_u64 << shift) as f64),
            None => write!(f, "{} bytes", self.0),
        }
    }
}

/// The files in which the kernel reports such kills.
#[derive(Debug, Clone)]
pub struct OomSources {
    /// The file that names the cgroups of this process.
    pub own_cgroups: PathBuf,
    /// Where cgroups are mounted.
    pub cgroups: PathBuf,
    /// The kernel's log.
    pub kernel_log: PathBuf,
    /// Whether the log uses our process ids, which it does not in a container.
    pub log_pids: LogPids,
}

/// Whose process ids the kernel's log uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogPids {
    /// The same as ours.
    Ours,
    /// Those outside our container: they cannot be used here.
    Foreign,
}

impl Default for OomSources {
    fn default() -> Self {
        // The kernel gives the first pid namespace this fixed number.
        let outermost =
            std::fs::read_link("/proc/self/ns/pid").is_ok_and(|link| link == Path::new("pid:[4026531836]"));
        Self {
            own_cgroups: "/proc/self/cgroup".into(),
            cgroups: "/sys/fs/cgroup".into(),
            kernel_log: "/dev/kmsg".into(),
            log_pids: if outermost { LogPids::Ours } else { LogPids::Foreign },
        }
    }
}

/// Detects out-of-memory kills since the job began.
#[derive(Debug)]
pub struct OomWatch {
    cgroup: Option<MemoryCgroup>,
    kills_before: u64,
    log: Option<KernelLog>,
}

impl OomWatch {
    /// The lowest memory limit among this process's cgroups, and what its own cgroup uses now; `None` if only the
    /// machine's memory limits it.
    pub fn memory_limit(&self) -> Option<(u64, u64)> {
        let cgroup = self.cgroup.as_ref()?;
        Some((cgroup.limit()?, cgroup.usage().unwrap_or(0)))
    }

    /// Starts watching; call it before the workers are started.
    pub fn start(sources: &OomSources) -> Self {
        let own = read_small(&sources.own_cgroups).unwrap_or_default();
        let cgroup = MemoryCgroup::find(&own, &sources.cgroups);
        let kills_before = cgroup.as_ref().and_then(MemoryCgroup::kills).unwrap_or(0);
        let readable = sources.log_pids == LogPids::Ours;
        let log = readable.then(|| KernelLog::open(&sources.kernel_log)).flatten();
        Self { cgroup, kills_before, log }
    }

    /// What is known about a worker that ended by a SIGKILL that this launcher did not send.
    pub fn killed(&mut self, pid: u32) -> Option<OomKill> {
        let victim = self.log.as_mut().and_then(|log| log.victim(pid));
        let cgroup = self.cgroup.as_ref();
        let grown = cgroup.and_then(MemoryCgroup::kills).is_some_and(|kills| kills > self.kills_before);
        if victim.is_none() && !grown {
            return None;
        }
        let held = victim.and_then(|victim| victim.held);
        Some(OomKill {
            limit: cgroup.and_then(MemoryCgroup::limit),
            held,
            together: cgroup.and_then(MemoryCgroup::usage),
        })
    }
}

/// The file names of one cgroup version.
#[derive(Debug)]
struct Files {
    kills: &'static str,
    limit: &'static str,
    usage: [&'static str; 2],
}

const V2: Files =
    Files { kills: "memory.events", limit: "memory.max", usage: ["memory.peak", "memory.current"] };
const V1: Files = Files {
    kills: "memory.oom_control",
    limit: "memory.limit_in_bytes",
    usage: ["memory.max_usage_in_bytes", "memory.usage_in_bytes"],
};

/// A memory cgroup.
#[derive(Debug)]
struct MemoryCgroup {
    mount: PathBuf,
    folder: PathBuf,
    files: &'static Files,
}

impl MemoryCgroup {
    /// Finds the memory cgroup. `own` is the text of `/proc/self/cgroup`: `0::/path` for version 2, `4:memory:/path`
    /// for version 1.
    fn find(own: &str, cgroups: &Path) -> Option<Self> {
        let path_of = |wanted: fn(&str, &str) -> bool| {
            own.lines().find_map(|line| {
                let (id, rest) = line.split_once(':')?;
                let (controllers, path) = rest.split_once(':')?;
                wanted(id, controllers).then(|| path.trim_start_matches('/').to_string())
            })
        };
        let v2 = path_of(|id, controllers| id == "0" && controllers.is_empty());
        let v1 = path_of(|_, controllers| controllers.split(',').any(|name| name == "memory"));
        let v2_at = |mount: &str| Self::at(cgroups.join(mount), v2.as_deref()?, &V2);
        v2_at("")
            .or_else(|| v2_at("unified"))
            .or_else(|| Self::at(cgroups.join("memory"), v1.as_deref()?, &V1))
    }

    /// In a container the path is often the host's, and our own cgroup is what is mounted.
    fn at(mount: PathBuf, path: &str, files: &'static Files) -> Option<Self> {
        let mut folders = [mount.join(path), mount.clone()].into_iter();
        let folder = folders.find(|folder| folder.join(files.kills).is_file())?;
        Some(Self { mount, folder, files })
    }

    fn kills(&self) -> Option<u64> {
        let text = read_small(&self.folder.join(self.files.kills))?;
        text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
    }

    /// The lowest limit among the cgroup and its ancestors: all of them apply.
    fn limit(&self) -> Option<u64> {
        let folders = self.folder.ancestors().take_while(|folder| folder.starts_with(&self.mount));
        folders.filter_map(|folder| bytes(&folder.join(self.files.limit))).min()
    }

    fn usage(&self) -> Option<u64> {
        self.files.usage.iter().find_map(|name| bytes(&self.folder.join(name)))
    }
}

/// Reads a number of bytes; `max`, and version 1's very large number, mean that there is no limit.
fn bytes(path: &Path) -> Option<u64> {
    read_small(path)?.trim().parse().ok().filter(|bytes| *bytes < 1 << 62)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// A fake machine: files in a temporary folder.
    struct Machine(tempfile::TempDir);

    impl Machine {
        fn new(own: &str) -> Self {
            let machine = Self(tempfile::tempdir().unwrap());
            machine.write("own", own);
            machine
        }

        fn write(&self, path: &str, text: &str) {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }

        fn watch(&self, log_pids: LogPids) -> OomWatch {
            let at = |path: &str| self.0.path().join(path);
            let (own_cgroups, cgroups, kernel_log) = (at("own"), at("cg"), at("kmsg"));
            OomWatch::start(&OomSources { own_cgroups, cgroups, kernel_log, log_pids })
        }
    }

    #[test]
    fn a_larger_count_is_a_kill_with_the_lowest_limit_of_all_ancestors() {
        let machine = Machine::new("0::/jobs/j7\n");
        let events =
            |kills| format!("low 0\nhigh 3\nmax 9\noom {kills}\noom_kill {kills}\noom_group_kill 0\n");
        machine.write("cg/jobs/j7/memory.events", &events(2));
        machine.write("cg/jobs/j7/memory.max", "max\n");
        machine.write("cg/jobs/memory.max", "8589934592\n");
        machine.write("cg/jobs/j7/memory.peak", "8589930496\n");
        let mut watch = machine.watch(LogPids::Foreign);
        assert_eq!(watch.killed(77), None, "control: old kills are not ours");
        machine.write("cg/jobs/j7/memory.events", &events(3));
        let kill = watch.killed(77).unwrap();
        assert_eq!(kill, OomKill { limit: Some(8 << 30), held: None, together: Some(8_589_930_496) });
        let text = "out of memory: the limit is 8.0 GiB, all processes together held up to 8.0 GiB";
        assert_eq!(kill.to_string(), text);
        let small = OomKill { held: Some(1 << 20), ..kill };
        assert_eq!(small.to_string(), format!("{text}, this one 1.0 MiB"));
    }

    #[test]
    fn version_one_is_read_beside_an_empty_version_two() {
        let machine = Machine::new("5:cpu:/\n4:hugetlb,memory:/job\n0::/\n");
        machine.write("cg/unified/cgroup.procs", "");
        machine.write("cg/memory/job/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n");
        machine.write("cg/memory/job/memory.limit_in_bytes", "1048576\n");
        machine.write("cg/memory/memory.limit_in_bytes", "9223372036854771712\n");
        machine.write("cg/memory/job/memory.max_usage_in_bytes", "1048000\n");
        let mut watch = machine.watch(LogPids::Foreign);
        assert_eq!(watch.killed(77), None);
        machine.write("cg/memory/job/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n");
        assert_eq!(
            watch.killed(77),
            Some(OomKill { limit: Some(1 << 20), held: None, together: Some(1_048_000) })
        );
    }

    #[test]
    fn in_a_container_the_mounted_cgroup_is_used() {
        let machine = Machine::new("0::/../../outside/pod\n");
        machine.write("cg/memory.events", "oom_kill 0\n");
        let mut watch = machine.watch(LogPids::Foreign);
        machine.write("cg/memory.events", "oom_kill 1\n");
        assert_eq!(watch.killed(77), Some(OomKill { limit: None, held: None, together: None }));
    }

    #[test]
    fn the_log_is_used_only_if_its_pids_are_ours() {
        for (log_pids, expected) in [(LogPids::Ours, Some(3 << 20)), (LogPids::Foreign, None)] {
            let machine = Machine::new("");
            machine.write("kmsg", "");
            let mut watch = machine.watch(log_pids);
            machine.write("kmsg", "3,1;Out of memory: Killed process 77 (p) total-vm:9kB, anon-rss:3072kB\n");
            assert_eq!(watch.killed(78), None);
            assert_eq!(watch.killed(77).and_then(|kill| kill.held), expected, "{log_pids:?}");
        }
    }

    #[test]
    fn missing_files_mean_no_kill() {
        for own in ["", "nonsense", "0::/gone\n", "::::\n"] {
            assert_eq!(Machine::new(own).watch(LogPids::Ours).killed(77), None, "{own}");
        }
        assert_eq!(OomWatch::start(&OomSources::default()).killed(std::process::id()), None);
    }
}
