//! `drumline sbatch` on a real Slurm: the output, exit code and requeue of submitted jobs.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use rank_test::slurm::Slurm;

use super::slurm::streams;
use super::started::BINARY;

const LONGEST: Duration = Duration::from_secs(60);

/// A submitted job.
struct Job<'a> {
    slurm: &'a Slurm,
    id: String,
}

impl<'a> Job<'a> {
    fn submit(slurm: &'a Slurm, args: &[&str]) -> Self {
        let sbatch = [&["sbatch", "--submit", "--output", "out-%j"], args].concat();
        let output = slurm.command(BINARY).args(sbatch).output().unwrap();
        let (stdout, stderr) = streams(&output);
        assert!(output.status.success(), "{stderr}");
        let id = stdout.trim().to_string();
        assert!(id.parse::<u32>().is_ok(), "only the job's number: {stdout}");
        Self { slurm, id }
    }

    /// Whether Slurm's description of the job contains `part`, such as `JobState=COMPLETED`.
    fn says(&self, part: &str) -> bool {
        let output =
            self.slurm.command("scontrol").args(["--oneliner", "show", "job", &self.id]).output().unwrap();
        streams(&output).0.split_whitespace().any(|word| word == part)
    }

    fn output(&self) -> String {
        fs::read_to_string(self.slurm.folder().join(format!("out-{}", self.id))).unwrap_or_default()
    }

    fn scancel(&self, args: &[&str]) {
        assert!(self.slurm.command("scancel").args(args).arg(&self.id).status().unwrap().success());
    }

    fn wait(&self, what: &str, done: impl Fn() -> bool) {
        let begin = Instant::now();
        while !done() {
            assert!(begin.elapsed() < LONGEST, "not {what}:\n{}\n{}", self.output(), self.slurm.logs());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn wait_state(&self, state: &str) {
        self.wait(state, || self.says(&format!("JobState={state}")));
    }

    fn wait_output(&self, text: &str) {
        self.wait(text, || self.output().contains(text));
    }

    /// The names in the shared folder that begin with `.drumline`.
    fn private_folders(&self) -> Vec<std::path::PathBuf> {
        let entries = fs::read_dir(self.slurm.folder()).unwrap().flatten().map(|entry| entry.path());
        let ours =
            |path: &std::path::PathBuf| path.file_name().unwrap().to_string_lossy().starts_with(".drumline");
        entries.filter(ours).collect()
    }
}

#[test]
fn a_submitted_job_prints_its_output_and_ends_with_its_exit_code() {
    let Some(slurm) = Slurm::new().unwrap() else { return };
    let odd = "it's $HOME \"#\" *";
    let name = ["--job-name", "two 'words' # \"x\""];
    let program = ["sh", "-c", r#"echo "rank $RANK of $WORLD_SIZE: $1"; exit "$2""#, "sh", odd];
    for (code, state, exit) in [("0", "COMPLETED", "ExitCode=0:0"), ("3", "FAILED", "ExitCode=1:0")] {
        let args = [&["--nproc-per-node", "2"], &name[..], &program, &[code]].concat();
        let job = Job::submit(&slurm, &args);
        job.wait_state(state);
        assert!(job.says(exit), "{}", job.output());
        assert!(job.says("NumCPUs=2") && job.says("JobName=two"), "{}", job.output());
        for rank in 0..2 {
            let line = format!("rank {rank} of 2: {odd}");
            assert!(code != "0" || job.output().contains(&line), "no {line} in {}", job.output());
        }
        assert!(job.private_folders().is_empty());
    }
}

#[test]
fn only_the_owner_can_read_the_key_and_it_is_removed_with_the_job() {
    let Some(slurm) = Slurm::new().unwrap() else { return };
    let job = Job::submit(&slurm, &["sh", "-c", "echo started; sleep 1000"]);
    job.wait_output("started");
    let folders = job.private_folders();
    let mode = |path: &std::path::Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let key = folders[0].join("key");
    assert_eq!((folders.len(), mode(&folders[0]), mode(&key)), (1, 0o700, 0o600));
    let text = fs::read_to_string(&key).unwrap();
    assert!(text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit()), "{text}");
    job.scancel(&[]);
    job.wait_state("CANCELLED");
    job.wait("clean", || job.private_folders().is_empty());
}

#[test]
fn a_job_that_is_warned_of_its_time_limit_is_requeued() {
    let Some(slurm) = Slurm::new().unwrap() else { return };
    let program =
        r#"echo "restarts: ${SLURM_RESTART_COUNT-none}"; test -n "$SLURM_RESTART_COUNT" || sleep 1000"#;
    let job = Job::submit(&slurm, &["--requeue", "--signal-before", "5", "sh", "-c", program]);
    job.wait_output("restarts: none");
    job.scancel(&["--signal=USR1", "--batch"]);
    job.wait_output("restarts: 1");
    job.wait_state("COMPLETED");
    assert!(job.says("Restarts=1") && job.private_folders().is_empty());
    let count = job.output().matches("restarts: ").count();
    assert_eq!(count, 2, "{}", job.output());
}

/// Saves and ends on SIGUSR1, as a training loop would at the end of a step.
const TRAINING: &str = r#"
import os, signal, time
def saved(*_):
    print("rank", os.environ["RANK"], "saved", flush=True)
    raise SystemExit(0)
signal.signal(signal.SIGUSR1, saved)
again = os.environ.get("SLURM_RESTART_COUNT", "0")
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "in run", again, flush=True)
while again == "0":
    time.sleep(0.1)
"#;

#[test]
fn the_ranks_of_two_nodes_save_when_warned_and_resume_in_the_next_run() {
    let Some(slurm) = Slurm::new().unwrap() else { return };
    fs::write(slurm.folder().join("train.py"), TRAINING).unwrap();
    let args = ["--nodes", "2", "--nproc-per-node", "2", "--requeue", "--signal-before", "20", "train.py"];
    let job = Job::submit(&slurm, &args);
    (0..4).for_each(|rank| job.wait_output(&format!("rank {rank} of 4 in run 0")));
    job.scancel(&["--signal=USR1", "--batch"]);
    (0..4).for_each(|rank| job.wait_output(&format!("rank {rank} saved")));
    (0..4).for_each(|rank| job.wait_output(&format!("rank {rank} of 4 in run 1")));
    job.wait_state("COMPLETED");
    assert!(job.says("ExitCode=0:0") && job.private_folders().is_empty(), "{}", job.output());
}

#[test]
fn a_job_that_slurm_refuses_is_an_error() {
    let Some(slurm) = Slurm::new().unwrap() else { return };
    let args = ["sbatch", "--submit", "--partition", "none-such", "true"];
    let output = slurm.command(BINARY).args(args).output().unwrap();
    let (stdout, stderr) = streams(&output);
    assert_eq!((output.status.code(), stdout.as_str()), (Some(1), ""));
    assert!(stderr.contains("partition") && stderr.contains("error: sbatch refused the job"), "{stderr}");
}
