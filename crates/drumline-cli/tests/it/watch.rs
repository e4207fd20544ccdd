//! `drumline watch` as a user runs it: what it prints, how it ends, and what following a large job costs.

use std::fs::{self, DirBuilder};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::DirBuilderExt;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use drumline_observe::fake::FakeRun;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::started::{Ended, Started};

/// A `drumline watch` that has printed its address.
struct Watching {
    started: Started,
    host: String,
    token: String,
}

impl Watching {
    fn new(args: &[&str], variables: &[(&str, &str)]) -> Self {
        let any_port = if args.contains(&"--port") { &[][..] } else { &["--port", "0"] };
        let args = [&["watch"], any_port, args].concat();
        let started = Started::with_variables(&args, variables);
        let url = started.line_of_stdout("http://");
        let (host, token) = url.trim().strip_prefix("http://").unwrap().split_once("/?token=").unwrap();
        Self { host: host.to_owned(), token: token.to_owned(), started }
    }

    fn update(&self, since: u64) -> Value {
        let mut stream = TcpStream::connect(&self.host).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let port = self.host.rsplit_once(':').unwrap().1;
        let cookie = format!("drumline-{port}={}", self.token);
        let head =
            format!("GET /update?since={since} HTTP/1.1\r\nHost: {}\r\nCookie: {cookie}\r\n", self.host);
        stream.write_all(format!("{head}Connection: close\r\n\r\n").as_bytes()).unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        serde_json::from_str(text.split_once("\r\n\r\n").unwrap().1).unwrap()
    }

    /// Seconds of a core that it has used.
    fn cpu(&self) -> f64 {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.started.pid())).unwrap();
        let fields: Vec<_> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
        let ticks: f64 = fields[11..13].iter().map(|ticks| ticks.parse::<f64>().unwrap()).sum();
        ticks / rustix::param::clock_ticks_per_second() as f64
    }

    fn interrupt(self) -> Ended {
        let pid = Pid::from_raw(i32::try_from(self.started.pid()).unwrap()).unwrap();
        kill_process(pid, Signal::INT).unwrap();
        self.started.end()
    }
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64()
}

#[test]
fn stdout_is_only_the_address_and_ctrl_c_is_a_success() {
    let folder = tempfile::tempdir().unwrap();
    FakeRun::create(folder.path(), 1).unwrap().step().unwrap();
    let watching = Watching::new(&[folder.path().to_str().unwrap()], &[]);
    watching.started.line_of_stderr("Ctrl-C closes the page");
    assert_eq!(watching.update(0)["runs"][0]["step"], 1);
    let ended = watching.interrupt();
    assert_eq!((ended.code, ended.stdout.lines().count()), (Some(0), 1), "{}", ended.stderr);
}

#[test]
fn without_a_folder_the_running_jobs_are_shown() {
    let runtime = tempfile::tempdir().unwrap();
    let registry = runtime.path().join("drumline/runs");
    DirBuilder::new().recursive(true).mode(0o700).create(&registry).unwrap();
    let folder = tempfile::tempdir().unwrap();
    FakeRun::create(folder.path(), 1).unwrap();
    let watching = Watching::new(&[], &[("XDG_RUNTIME_DIR", runtime.path().to_str().unwrap())]);
    assert_eq!(watching.update(0)["runs"].as_array().map(Vec::len), Some(0));
    let pid = std::process::id();
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let start: u64 = stat.rsplit_once(") ").unwrap().1.split(' ').nth(19).unwrap().parse().unwrap();
    let entry = serde_json::json!({"pid": pid, "start": start, "dir": folder.path(), "name": "job a"});
    fs::write(registry.join(format!("{pid}.json")), entry.to_string()).unwrap();
    let begin = Instant::now();
    while watching.update(0)["runs"][0]["name"] != "job a" {
        assert!(begin.elapsed() < Duration::from_secs(20), "the job never appeared");
        std::thread::sleep(Duration::from_millis(100));
    }
    watching.interrupt();
}

#[test]
fn a_taken_port_is_skipped_and_a_missing_folder_is_waited_for() {
    let parent = tempfile::tempdir().unwrap();
    let exp = parent.path().join("exp");
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let watching = Watching::new(&["--port", &port.to_string(), exp.to_str().unwrap()], &[]);
    let own: u16 = watching.host.rsplit_once(':').unwrap().1.parse().unwrap();
    assert!(own > port && own < port + 32, "{own}, requested {port}");
    watching.started.line_of_stderr(&format!("note: port {port} is taken; this page has {own}"));
    watching.started.line_of_stderr("exp does not exist yet");
    assert_eq!(watching.update(0)["runs"][0]["state"], "waiting");
    FakeRun::create(&exp.join("a"), 1).unwrap().step().unwrap();
    let begin = Instant::now();
    while watching.update(0)["runs"][0]["name"] != "exp/a" {
        assert!(begin.elapsed() < Duration::from_secs(20), "the run never appeared");
        std::thread::sleep(Duration::from_millis(100));
    }
    assert_eq!(watching.interrupt().code, Some(0));
    // A file cannot become a folder.
    let file = tempfile::NamedTempFile::new().unwrap();
    let ended = Started::new(&["watch", "--port", "0", file.path().to_str().unwrap()]).end();
    assert!(ended.code == Some(1) && ended.stderr.contains("cannot watch `"), "{}", ended.stderr);
}

#[test]
fn sixty_four_ranks_at_ten_events_a_second_cost_little() {
    const RANKS: usize = 64;
    const TICKS: u32 = 60;
    let tick = Duration::from_millis(100);
    let folder = tempfile::tempdir().unwrap();
    let mut run = FakeRun::create(folder.path(), RANKS).unwrap();
    let watching = Watching::new(&[folder.path().to_str().unwrap()], &[]);
    let (mut version, mut points) = (0, 0);
    let (begin, cpu) = (Instant::now(), watching.cpu());
    for number in 1..=TICKS {
        (0..RANKS).for_each(|_| run.step().unwrap());
        run.write_ranks(now()).unwrap();
        // As often as a browser polls.
        if number.is_multiple_of(10) {
            let answer = watching.update(version);
            version = answer["version"].as_u64().unwrap();
            assert_eq!(answer["runs"][0]["ranks"].as_array().map(Vec::len), Some(RANKS));
            points += answer["runs"][0]["curves"][1]["points"].as_array().map_or(0, Vec::len);
        }
        std::thread::sleep((tick * number).saturating_sub(begin.elapsed()));
    }
    let share = (watching.cpu() - cpu) / begin.elapsed().as_secs_f64();
    println!("{:.2} % of a core for {RANKS} ranks at 10 events a second each", share * 100.0);
    assert!(points > 1000, "{points} points");
    assert!(share < 0.05, "{share} of a core");
    watching.interrupt();
}
