//! A real Slurm runs and leaves nothing behind.

use rank_test::slurm::Slurm;

#[test]
fn a_slurm_of_two_nodes_runs_a_step_and_leaves_nothing() {
    let Some(slurm) = Slurm::new().unwrap() else { return };
    let step = [
        "-N2",
        "--ntasks-per-node=2",
        "sh",
        "-c",
        "echo $SLURM_PROCID $(cat /proc/sys/kernel/hostname) $SLURM_STEP_NODELIST",
    ];
    let output = slurm.command("srun").args(step).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let mut lines: Vec<_> = text.lines().collect();
    lines.sort_unstable();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(
        lines,
        ["0 host1 host[1-2]", "1 host1 host[1-2]", "2 host2 host[1-2]", "3 host2 host[1-2]"],
        "{stderr}\n{}",
        slurm.logs()
    );
    // A job without a waiting client, with a process that has left its session.
    let folder = slurm.folder().to_path_buf();
    let batch = ["--wrap", "setsid sleep 1000 & touch started; sleep 1000"];
    assert!(slurm.command("sbatch").args(batch).status().unwrap().success());
    let begin = std::time::Instant::now();
    while !folder.join("started").exists() {
        assert!(begin.elapsed().as_secs() < 30, "{}", slurm.logs());
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    drop(slurm);
    assert!(!folder.exists());
    let left = std::fs::read_dir("/proc").unwrap().flatten().filter(|entry| {
        let environ = std::fs::read(entry.path().join("environ")).unwrap_or_default();
        String::from_utf8_lossy(&environ).contains(folder.to_str().unwrap())
    });
    assert_eq!(left.count(), 0);
}
