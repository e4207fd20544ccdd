//! Whole jobs on two hosts over a real `ssh`: `drumline run --hostfile` on a third host, as a user types it.

use std::fs;
use std::io::Read;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use rank_test::leftovers::{Leftover, Watch};
use rank_test::netns::Hosts;
use rank_test::sshd::{PORT, Ssh, Sshd};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use super::started::BINARY;

/// Host 0 with 2 slots, host 1 with 3.
const NUM_RANKS: usize = 5;
const LONGEST: Duration = Duration::from_secs(60);

struct Place {
    hosts: Hosts,
    ssh: Ssh,
    _servers: Vec<Sshd>,
    folder: TempDir,
    watch: Watch,
}

impl Place {
    fn new() -> Option<Self> {
        let (hosts, ssh) = (Hosts::new(3).unwrap()?, Ssh::new().unwrap()?);
        let servers =
            [0, 1].map(|host| ssh.serve(&hosts.prefix(host), hosts.address(host).into()).unwrap()).into();
        let (folder, watch) = (TempDir::with_prefix("fleet-job").unwrap(), Watch::new());
        let list = [0, 1].map(|host| format!("{} slots={}\n", hosts.address(host), host + 2)).concat();
        fs::write(folder.path().join("hosts"), list).unwrap();
        // The file of variables carries the mark to the other hosts.
        let (name, mark) = watch.mark();
        fs::write(folder.path().join("variables"), format!("{name}={mark}\nGREETING=\"hello you\"\n"))
            .unwrap();
        Some(Self { hosts, ssh, _servers: servers, folder, watch })
    }

    /// Starts the leader on host 2, with a shell script as the program.
    fn start(&self, flags: &[&str], script: &str) -> Job {
        self.start_on(2, flags, script)
    }

    fn start_on(&self, leader: usize, flags: &[&str], script: &str) -> Job {
        let (name, mark) = self.watch.mark();
        let mut command = self.hosts.command(leader, BINARY);
        let path = |name| self.folder.path().join(name);
        command
            .args(["run", "--hostfile", "hosts", "--ssh_port", &PORT.to_string(), "--launcher_args"])
            .arg(self.ssh.client_args().join(" "))
            .args(["--shutdown-timeout", "5"])
            .args(flags)
            .args(["sh", "-c", script])
            .current_dir(self.folder.path())
            .env("DS_ENV_FILE", path("variables"))
            .env(name, mark)
            .stdin(Stdio::null())
            .stdout(fs::File::create(path("stdout")).unwrap())
            .stderr(fs::File::create(path("stderr")).unwrap());
        Job { child: command.spawn().unwrap(), folder: self.folder.path().to_path_buf() }
    }
}

struct Job {
    child: Child,
    folder: std::path::PathBuf,
}

impl Job {
    fn stream(&self, stream: &str) -> String {
        let mut bytes = Vec::new();
        fs::File::open(self.folder.join(stream)).unwrap().read_to_end(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn wait_for_lines(&self, needle: &str, count: usize) {
        let begin = Instant::now();
        while self.stream("stdout").lines().filter(|line| line.contains(needle)).count() < count {
            assert!(begin.elapsed() < LONGEST, "{}{}", self.stream("stdout"), self.stream("stderr"));
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    fn end(&mut self) -> Option<i32> {
        let begin = Instant::now();
        while self.child.try_wait().unwrap().is_none() {
            if begin.elapsed() > LONGEST {
                self.child.kill().unwrap();
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        self.child.wait().unwrap().code()
    }
}

#[test]
fn ranks_run_on_both_hosts_and_know_their_places() {
    let Some(place) = Place::new() else { return };
    let script = r#"echo "is $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE node $GROUP_RANK gpus \
$CUDA_VISIBLE_DEVICES on $(cat /proc/sys/kernel/hostname) $GREETING $PWD""#;
    // A leader may be one of the hosts itself: that one needs no ssh.
    for leader in [2, 0] {
        let mut job = place.start_on(leader, &[], script);
        assert_eq!(job.end(), Some(0), "{}", job.stream("stderr"));
        let (text, folder) = (job.stream("stdout"), place.folder.path().display());
        for rank in 0..NUM_RANKS {
            let (node, local, size) = if rank < 2 { (0, rank, 2) } else { (1, rank - 2, 3) };
            let gpus = ["0,1", "0,1,2"][node];
            let line = format!(
                "is {rank}/{NUM_RANKS} {local}/{size} node {node} gpus {gpus} on host{node} hello you {folder}"
            );
            assert_eq!(
                text.lines().filter(|other| other.ends_with(&line)).count(),
                1,
                "no `{line}` in {text}"
            );
        }
        place.watch.none_within(Duration::from_secs(1)).unwrap();
    }
}

#[test]
fn an_unreachable_host_is_an_error_and_nothing_is_left_on_the_others() {
    let Some(place) = Place::new() else { return };
    let list = place.folder.path().join("hosts");
    fs::write(&list, fs::read_to_string(&list).unwrap() + "10.77.0.99 slots=1\n").unwrap();
    let begin = Instant::now();
    let mut job = place.start(&[], "sleep 300");
    assert_eq!(job.end(), Some(1));
    let stderr = job.stream("stderr");
    assert!(stderr.contains("error: cannot reach 10.77.0.99: ssh: connect to host"), "{stderr}");
    assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
    place.watch.none_within(Duration::from_secs(1)).unwrap();
}

#[test]
fn a_rank_that_fails_on_one_host_ends_the_job_on_both() {
    let Some(place) = Place::new() else { return };
    let mut job = place.start(&[], r#"if [ "$RANK" = 3 ]; then echo broken >&2; exit 9; fi; exec sleep 300"#);
    let begin = Instant::now();
    assert_eq!(job.end(), Some(1), "{}", job.stream("stderr"));
    assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
    assert!(job.stream("stderr").contains("rank 3"), "{}", job.stream("stderr"));
    place.watch.none_within(Duration::from_secs(1)).unwrap();
}

#[test]
fn a_leader_that_is_killed_leaves_nothing_on_any_host() {
    let Some(place) = Place::new() else { return };
    for leader in [2, 0] {
        let mut job = place.start_on(leader, &[], "echo up; sleep 300 & wait");
        job.wait_for_lines("up", NUM_RANKS);
        // The control: they do not end by themselves.
        std::thread::sleep(Duration::from_millis(1500));
        let is_sleeper =
            |left: &&Leftover| matches!(left, Leftover::Process { command, .. } if command == "sleep 300");
        assert_eq!(place.watch.now().iter().filter(is_sleeper).count(), NUM_RANKS);
        job.signal(Signal::KILL);
        job.child.wait().unwrap();
        place.watch.none_within(Duration::from_secs(1)).unwrap();
    }
}

#[test]
fn one_ctrl_c_reaches_every_rank_and_a_second_ends_those_that_ignore_it() {
    let Some(place) = Place::new() else { return };
    let script = "for s in INT TERM; do trap \"echo caught $s; exit 0\" $s; done; echo up; while :; do sleep 0.05; done";
    let mut heeding = place.start(&[], script);
    heeding.wait_for_lines("up", NUM_RANKS);
    heeding.signal(Signal::INT);
    assert_eq!(heeding.end(), Some(130), "{}", heeding.stream("stderr"));
    let (stderr, text) = (heeding.stream("stderr"), heeding.stream("stdout"));
    assert_eq!(text.matches("caught").count(), NUM_RANKS, "{text}{stderr}");
    // An agent that learns of the stop from the other agent before the leader's signal arrives stops its ranks by SIGTERM.
    assert!(text.contains("caught INT"), "{text}");
    place.watch.none_within(Duration::from_secs(1)).unwrap();
    let flags = ["--shutdown-timeout", "300"];
    let mut deaf = place.start(&flags, "trap 'echo caught' INT TERM; echo up; while :; do sleep 0.05; done");
    deaf.wait_for_lines("up", NUM_RANKS);
    deaf.signal(Signal::INT);
    deaf.wait_for_lines("caught", NUM_RANKS);
    std::thread::sleep(Duration::from_millis(500));
    assert!(deaf.child.try_wait().unwrap().is_none(), "the control: one signal does not end it");
    let begin = Instant::now();
    deaf.signal(Signal::INT);
    deaf.end();
    assert!(begin.elapsed() < Duration::from_secs(3), "{:?}", begin.elapsed());
    place.watch.none_within(Duration::from_secs(1)).unwrap();
}
