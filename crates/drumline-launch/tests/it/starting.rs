//! What a worker gets at its start, and what happens when one cannot be started.

use std::time::{Duration, Instant};

use drumline_launch::placing::{Cores, Topology};
use drumline_launch::{LaunchError, LocalJob, Output, RunOptions, RunningJob, WorkerSpec};

#[test]
fn every_rank_has_its_place_and_its_own_session() {
    let script = "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $GROUP_RANK $GROUP_WORLD_SIZE $COLOUR; \
                  cut -d ' ' -f 1,5,6 /proc/$$/stat";
    let job = LocalJob::new(3, "sh", ["-c", script]).env("COLOUR", "green").output(Output::Capture);
    let report = job.deadline(Duration::from_secs(20)).start().unwrap().wait();
    assert!(report.is_success(), "{report}");
    for (rank, worker) in report.ranks.iter().enumerate() {
        let pid = worker.pid;
        let expected = format!("{rank} 3 {rank} 3 0 1 green\n{pid} {pid} {pid}\n");
        assert_eq!(worker.stdout_text(), expected);
    }
}

#[test]
fn the_job_key_is_inherited_in_memory_that_cannot_be_changed() {
    let script = "key=/proc/self/fd/$DRUMLINE_JOB_KEY_FD; wc -c <$key; echo ${DRUMLINE_JOB_KEY_FILE-none}; \
                  sh -c \"printf x >>$key && echo changed\" 2>/dev/null; wc -c <$key";
    let job = LocalJob::new(1, "sh", ["-c", script]).env("DRUMLINE_TRANSPORT", "tcp");
    let report = job.output(Output::Capture).start().unwrap().wait();
    assert_eq!(report.ranks[0].stdout_text(), "32\nnone\n32\n", "{report}");
}

#[test]
fn a_job_of_zero_processes_is_an_error() {
    let error = LocalJob::new(0, "true", [""; 0]).start().unwrap_err();
    assert!(matches!(error, LaunchError::NoProcesses), "{error}");
}

#[test]
fn if_one_worker_cannot_be_started_none_is_left() {
    let sleep =
        |rank| WorkerSpec { rank, program: "sleep".into(), args: vec!["77".into()], ..WorkerSpec::default() };
    let missing = WorkerSpec { rank: 2, program: "/no/such/program".into(), ..WorkerSpec::default() };
    let start = Instant::now();
    let error = RunningJob::start(vec![sleep(0), sleep(1), missing], RunOptions::default()).unwrap_err();
    let text = error.to_string();
    assert!(text.starts_with("rank 2: cannot start `/no/such/program`") && text.contains("; try "), "{text}");
    assert!(start.elapsed() < Duration::from_secs(5));
    let me = std::process::id();
    let children = std::fs::read_dir("/proc").unwrap().flatten().filter(|entry| {
        let read = |file| std::fs::read_to_string(entry.path().join(file)).unwrap_or_default();
        read("cmdline") == "sleep\x0077\0" && read("stat").contains(&format!(" {me} "))
    });
    assert_eq!(children.count(), 0);
}

#[test]
fn a_worker_runs_on_its_own_cores_only() {
    let here = Topology::here();
    let all: Cores = here.cpus().iter().map(|cpu| cpu.id).collect();
    let first: Cores = all.first().into_iter().collect();
    let script = "grep Cpus_allowed_list /proc/self/status";
    let spec = |rank, cores: Option<Cores>| WorkerSpec {
        rank,
        program: "sh".into(),
        args: vec!["-c".into(), script.into()],
        cores,
        ..WorkerSpec::default()
    };
    let options = RunOptions { output: Output::Capture, ..RunOptions::default() };
    let specs = vec![spec(0, Some(first.clone())), spec(1, None), spec(2, Some(all.clone()))];
    let report = RunningJob::start(specs, options).unwrap().wait();
    let printed = |rank: usize| report.ranks[rank].stdout_text().trim().to_string();
    let list = |cores: &Cores| format!("Cpus_allowed_list:\t{cores}");
    assert_eq!([printed(0), printed(2)], [list(&first), list(&all)], "{report}");
    assert_eq!(printed(1), list(&all), "control: an unbound worker may use all cores of the launcher");
}

#[test]
fn cores_that_do_not_exist_are_an_error() {
    let cores = Some(std::iter::once(1023).collect());
    let spec = WorkerSpec { program: "true".into(), cores, ..WorkerSpec::default() };
    let error = RunningJob::start(vec![spec], RunOptions::default()).unwrap_err().to_string();
    assert!(error.contains("try --numa-binding none"), "{error}");
}
