//! Reads the kernel log, if permitted: it names the processes that were killed for lack of memory.
//!
//! It is opened at its end when the job starts, so that only newer records are read, and only a limited number of them.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::OFlags;

/// The size of the largest kernel record; the kernel refuses a smaller buffer.
const LARGEST_RECORD: usize = 16 << 10;
/// The most records that are read at once.
const MOST_RECORDS: usize = 20_000;

/// The kernel log since the job's start.
#[derive(Debug)]
pub(crate) struct KernelLog {
    file: File,
    victims: String,
}

impl KernelLog {
    /// Opens the log; `None` if this user may not read it.
    pub(crate) fn open(path: &Path) -> Option<Self> {
        let mut file =
            OpenOptions::new().read(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(path).ok()?;
        file.seek(SeekFrom::End(0)).ok()?;
        Some(Self { file, victims: String::new() })
    }

    /// The record of the process, if the log says that the kernel killed it for lack of memory.
    pub(crate) fn victim(&mut self, pid: u32) -> Option<Victim> {
        self.read_new();
        self.victims.lines().rev().find_map(|line| victim(line).filter(|victim| victim.pid == pid))
    }

    fn read_new(&mut self) {
        let mut record = vec![0; LARGEST_RECORD];
        for _ in 0..MOST_RECORDS {
            match self.file.read(&mut record) {
                Ok(0) => return,
                Ok(length) => self.keep(&String::from_utf8_lossy(&record[..length])),
                // The oldest records were overwritten before we read them: continue with the next.
                Err(error) if error.kind() == ErrorKind::BrokenPipe => {}
                Err(_) => return,
            }
        }
    }

    fn keep(&mut self, record: &str) {
        record.lines().filter(|line| victim(line).is_some()).for_each(|line| {
            self.victims.push_str(line);
            self.victims.push('\n');
        });
    }
}

/// One process that the kernel killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Victim {
    pub(crate) pid: u32,
    /// Bytes of anonymous and shared memory that it held, if the line says so; file pages do not count.
    pub(crate) held: Option<u64>,
}

/// `… out of memory: Killed process 7 (name) total-vm:1kB, anon-rss:2kB, …` or `oom-kill:…,task=name,pid=7,uid=0`.
fn victim(line: &str) -> Option<Victim> {
    let lower = line.to_ascii_lowercase();
    if let Some((_, after)) = lower.split_once("out of memory: killed process ") {
        let kib = |name: &str| after.rsplit_once(name).and_then(|(_, rest)| number(rest));
        let held = kib("anon-rss:").map(|own| own.saturating_add(kib("shmem-rss:").unwrap_or(0)));
        let pid = u32::try_from(number(after)?).ok()?;
        return Some(Victim { pid, held: held.map(|kib| kib.saturating_mul(1024)) });
    }
    let (_, after) = line.split_once("oom-kill:")?;
    let (_, pid) = after.rsplit_once(",pid=")?;
    Some(Victim { pid: u32::try_from(number(pid)?).ok()?, held: None })
}

fn number(text: &str) -> Option<u64> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    text[..digits].parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    const GLOBAL: &str = "3,1,99,-;Out of memory: Killed process 4711 (python3) total-vm:9000kB, anon-rss:1024kB, \
                          file-rss:7kB, shmem-rss:1024kB, UID:0 pgtables:40kB oom_score_adj:0";
    const CGROUP: &str =
        "3,2,99,-;Memory cgroup out of memory: Killed process 4712 (a) b) total-vm:1kB, anon-rss:8kB";
    const CONSTRAINT: &str = "6,3,99,-;oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),oom_memcg=/j,task_memcg=/j,\
                              task=x,pid=1,pid=4713,uid=0";

    #[test]
    fn the_kernels_lines_are_parsed() {
        assert_eq!(victim(GLOBAL), Some(Victim { pid: 4711, held: Some(2 << 20) }));
        assert_eq!(victim(CGROUP), Some(Victim { pid: 4712, held: Some(8 << 10) }));
        assert_eq!(victim(CONSTRAINT), Some(Victim { pid: 4713, held: None }));
        for line in
            ["", "python3 invoked oom-killer: gfp_mask=0xcc0", "Out of memory: Killed process x", "oom-kill:"]
        {
            assert_eq!(victim(line), None, "{line}");
        }
    }

    #[test]
    fn only_records_after_the_start_count() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kmsg");
        std::fs::write(&path, format!("{GLOBAL}\n")).unwrap();
        let mut log = KernelLog::open(&path).unwrap();
        assert_eq!(log.victim(4711), None, "an old process with the same pid");
        let mut file = OpenOptions::new().append(true).open(&path).unwrap();
        writeln!(file, "noise\n{CGROUP}\n{CONSTRAINT}").unwrap();
        assert_eq!(log.victim(4712).unwrap().held, Some(8 << 10));
        assert_eq!(log.victim(4713).unwrap().held, None, "records read for another pid are kept");
        assert_eq!(log.victim(1), None);
    }

    #[test]
    fn an_unreadable_log_is_none() {
        assert!(KernelLog::open(Path::new("/no/such/log")).is_none());
    }

    #[test]
    fn reading_the_real_log_does_not_block() {
        if let Some(mut log) = KernelLog::open(Path::new("/dev/kmsg")) {
            assert_eq!(log.victim(std::process::id()), None);
        }
    }
}
