//! Agents that are started over a real `ssh`, by a leader on another host.
//!
//! ```text
//!   host 2 (the leader) ──ssh──▶ host 0, host 1: `drumline on-host` ─▶ the agent
//! ```
//! The agent is a script that writes down what it was given, so that these tests see what the leader does.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use drumline_launch::{
    Fleet, FleetEnd, HostCommand, HostProblem, HostSlots, LaunchPlan, Leader, LeaderHandle, Signal, Site,
    Starter,
};
use drumline_rendezvous::JobKey;
use rank_test::netns::Hosts;
use rank_test::sshd::{PORT, Ssh, Sshd};
use tempfile::TempDir;

use super::started::BINARY;

/// Writes what it was given to a file with its host's name, then follows its orders.
const AGENT: &str = r#"#!/bin/sh
IFS= read -r key
out="$FLEET_TEST_OUT/$(cat /proc/sys/kernel/hostname)"
{
    echo "folder $PWD"
    echo "key ${#key}"
    echo "gpus $CUDA_VISIBLE_DEVICES"
    echo "pet ${PET_ROLE-none}"
    for word in "$@"; do
        printf 'word '
        printf %s "$word" | od -An -v -tx1 | tr -d ' \n'
        echo
    done
} > "$out.part"
mv "$out.part" "$out.given"
case "$FLEET_TEST_DO" in
    end) exit 0 ;;
    "fail on $(cat /proc/sys/kernel/hostname)") exit 7 ;;
esac
while IFS= read -r order; do
    echo "$order" >> "$out.orders"
    [ "$FLEET_TEST_DO" = stubborn ] || exit 130
done
echo gone >> "$out.orders"
exit 137
"#;

/// Three hosts, two of them with an sshd, and the folder to which agents write.
struct Place {
    hosts: Hosts,
    ssh: Ssh,
    _servers: Vec<Sshd>,
    folder: TempDir,
}

impl Place {
    fn new() -> Option<Self> {
        let (hosts, ssh) = (Hosts::new(3).unwrap()?, Ssh::new().unwrap()?);
        let serve = |host| ssh.serve(&hosts.prefix(host), hosts.address(host).into()).unwrap();
        let servers = [0, 1].map(serve).into();
        let folder = TempDir::with_prefix("fleet test '$x").unwrap();
        fs::write(folder.path().join("agent"), AGENT).unwrap();
        fs::set_permissions(folder.path().join("agent"), PermissionsExt::from_mode(0o755)).unwrap();
        Some(Self { hosts, ssh, _servers: servers, folder })
    }

    fn fleet(&self, hosts: &[usize]) -> Fleet {
        let host = |&host: &usize| HostSlots {
            name: self.hosts.address(host).to_string(),
            slots: (0..=host).collect(),
        };
        Fleet {
            hosts: hosts.iter().map(host).collect(),
            nproc: None,
            starter: Starter::Ssh,
            ssh_port: Some(PORT),
            starter_args: self.ssh.client_args(),
        }
    }

    /// The commands that the leader runs, on host 2.
    fn commands(&self, fleet: &Fleet, does: &str, args: Vec<OsString>) -> Vec<HostCommand> {
        let site = Site {
            drumline: BINARY.into(),
            agent: self.folder.path().join("agent"),
            dir: self.folder.path().to_path_buf(),
            variables: vec![
                ("FLEET_TEST_OUT".into(), self.folder.path().into()),
                ("FLEET_TEST_DO".into(), does.into()),
            ],
            here: [self.hosts.address(2).to_string()].into(),
        };
        let plan = LaunchPlan { args, fleet: Some(fleet.clone()), ..plan() };
        let on_leader = |mut command: HostCommand| {
            let mut words = self.hosts.prefix(2);
            words.extend([command.program].into_iter().chain(command.args));
            command.args = words.split_off(1);
            command.program = words.remove(0);
            command
        };
        fleet.commands(&plan, &site).into_iter().map(on_leader).collect()
    }

    fn start(&self, hosts: &[usize], does: &str) -> Leader {
        let commands = self.commands(&self.fleet(hosts), does, Vec::new());
        Leader::start(&commands, &JobKey::random(), Duration::from_secs(1)).unwrap()
    }

    fn file(&self, host: usize, what: &str) -> PathBuf {
        self.folder.path().join(format!("host{host}.{what}"))
    }

    /// Waits for a file of a host's agent, and returns its text.
    fn written(&self, host: usize, what: &str) -> String {
        let begin = Instant::now();
        loop {
            match fs::read_to_string(self.file(host, what)) {
                Ok(text) => return text,
                Err(error) => {
                    assert!(begin.elapsed() < Duration::from_secs(20), "no {what} of {host}: {error}")
                }
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

fn plan() -> LaunchPlan {
    use drumline_launch::{NodeRange, Program, Rendezvous};
    LaunchPlan {
        nodes: NodeRange::exactly(2),
        run_id: "job".to_string(),
        rendezvous: Rendezvous::Static { addr: "10.77.0.1".to_string(), port: 29500 },
        signals: vec![Signal::INT],
        shutdown_timeout: Duration::from_secs(1),
        ..LaunchPlan::new(Program::Executable("prog".into()))
    }
}

/// Waits on another thread, so that the test can continue, and with a time limit.
fn ending(leader: Leader) -> (LeaderHandle, impl FnOnce() -> FleetEnd) {
    let (handle, (sender, receiver)) = (leader.handle(), std::sync::mpsc::channel());
    std::thread::spawn(move || sender.send(leader.wait()));
    (handle, move || receiver.recv_timeout(Duration::from_secs(30)).unwrap())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn every_host_gets_its_command_line_unchanged() {
    let Some(place) = Place::new() else { return };
    let args = [
        OsString::from_vec((1..=255).collect()),
        "".into(),
        "two  words; $(touch x) `y` \"q\" 'p' \\ * ~ !!".into(),
        "line\nline\n".into(),
        "x".repeat(100_000).into(),
    ];
    let commands = place.commands(&place.fleet(&[0, 1, 2]), "end", args.to_vec());
    assert!(commands.iter().all(|command| !format!("{:?}", command.args).contains("FLEET_TEST")));
    let leader = Leader::start(&commands, &JobKey::random(), Duration::from_secs(1)).unwrap();
    assert_eq!(ending(leader).1(), FleetEnd { code: 0, problems: vec![] });
    for host in 0..3 {
        let text = place.written(host, "given");
        let words: Vec<_> = text.lines().filter_map(|line| line.strip_prefix("word ")).collect();
        let sent = args.iter().map(|arg| hex(&arg.clone().into_vec())).collect::<Vec<_>>();
        assert_eq!(words[words.len() - args.len()..], sent);
        let slots = ["0", "0,1", "0,1,2"][host];
        for line in [
            format!("folder {}", place.folder.path().display()),
            "key 64".to_string(),
            format!("gpus {slots}"),
            format!("word {}", hex(format!("--node-rank={host}").as_bytes())),
            format!("word {}", hex(format!("--nproc-per-node={}", host + 1).as_bytes())),
        ] {
            assert!(text.lines().any(|other| other == line), "host {host}: no `{line}` in {text}");
        }
    }
}

#[test]
fn a_host_that_cannot_be_reached_is_named_and_the_others_are_stopped() {
    let Some(place) = Place::new() else { return };
    let mut fleet = place.fleet(&[0, 1]);
    fleet.hosts.push(HostSlots { name: "10.77.0.99".to_string(), slots: vec![0] });
    let commands = place.commands(&fleet, "wait", Vec::new());
    let leader = Leader::start(&commands, &JobKey::random(), Duration::from_secs(1)).unwrap();
    let begin = Instant::now();
    let end = ending(leader).1();
    assert!(begin.elapsed() < Duration::from_secs(20));
    assert_eq!(end.code, 1);
    let [HostProblem::Unreachable { host, output }] = &end.problems[..] else { panic!("{end:?}") };
    assert!(host == "10.77.0.99" && output.contains("10.77.0.99 port 22022"), "{end:?}");
    assert_eq!(place.written(0, "orders"), "SIGTERM\n");
}

#[test]
fn a_host_without_the_program_is_named() {
    let Some(place) = Place::new() else { return };
    let mut commands = place.commands(&place.fleet(&[0, 1]), "end", Vec::new());
    let words = &mut commands[1].args;
    let program = words.iter().position(|word| word == BINARY).unwrap();
    words[program] = "/no/such/drumline".into();
    let leader = Leader::start(&commands, &JobKey::random(), Duration::from_secs(1)).unwrap();
    let end = ending(leader).1();
    let [HostProblem::NoDrumline { host, output }] = &end.problems[..] else { panic!("{end:?}") };
    assert!(host == "10.77.0.2" && output.contains("/no/such/drumline"), "{end:?}");
}

#[test]
fn the_first_failure_is_the_exit_code_and_the_others_are_stopped() {
    let Some(place) = Place::new() else { return };
    let end = ending(place.start(&[0, 1], "fail on host1")).1();
    assert_eq!(end, FleetEnd { code: 7, problems: vec![] });
    assert_eq!(place.written(0, "orders"), "SIGTERM\n");
    assert!(!place.file(1, "orders").exists(), "the one that failed got no order");
}

#[test]
fn the_first_signal_is_forwarded_and_the_second_ends_all_at_once() {
    let Some(place) = Place::new() else { return };
    for (does, signals, orders, code) in
        [("wait", 1, "SIGINT\n", 130), ("stubborn", 2, "SIGUSR1\nSIGINT\ngone\n", 137)]
    {
        let (handle, end) = ending(place.start(&[0, 1], does));
        [0, 1].iter().for_each(|host| drop(place.written(*host, "given")));
        if does == "stubborn" {
            handle.pass_on(Signal::USR1);
        }
        for _ in 0..signals {
            handle.stop(Signal::INT);
            std::thread::sleep(Duration::from_millis(300));
        }
        assert_eq!(end(), FleetEnd { code, problems: vec![] }, "{does}");
        for host in [0, 1] {
            assert_eq!(place.written(host, "orders"), orders, "{does}");
            ["orders", "given"].iter().for_each(|what| fs::remove_file(place.file(host, what)).unwrap());
        }
    }
}

#[test]
fn agents_notice_that_their_leader_has_ended() {
    let Some(place) = Place::new() else { return };
    let leader = place.start(&[0, 1], "stubborn");
    [0, 1].iter().for_each(|host| drop(place.written(*host, "given")));
    assert!(!place.file(0, "orders").exists(), "there are no orders while the leader runs");
    let begin = Instant::now();
    drop(leader);
    assert!(begin.elapsed() < Duration::from_secs(1), "{:?}", begin.elapsed());
    [0, 1].iter().for_each(|host| assert_eq!(place.written(*host, "orders"), "gone\n"));
}

#[test]
fn open_mpi_can_start_agents_too() {
    if !rank_test::require_tool("mpirun") {
        return;
    }
    let Some(place) = Place::new() else { return };
    // mpirun uses `ssh`, and needs its options; root needs a flag.
    let ssh = format!("OMPI_MCA_plm_rsh_agent=ssh -p {PORT} {}", place.ssh.client_args().join(" "));
    let starter_args = vec!["--allow-run-as-root".to_string()];
    let fleet = Fleet { starter: Starter::OpenMpi, starter_args, ..place.fleet(&[0, 1]) };
    let start = |does: &str| {
        let mut commands = place.commands(&fleet, does, vec!["a 'b' $c".into()]);
        for (host, HostCommand { args, .. }) in commands.iter_mut().enumerate() {
            // Two mpiruns that start at once on one machine would use the same session folder.
            let own = place.folder.path().join(format!("mpirun{host}"));
            fs::create_dir_all(&own).unwrap();
            let mpirun = args.iter().position(|word| word == "mpirun").unwrap();
            let own = format!("TMPDIR={}", own.display());
            args.splice(mpirun..mpirun, ["env".into(), ssh.clone().into(), own.into()]);
        }
        ending(Leader::start(&commands, &JobKey::random(), Duration::from_secs(1)).unwrap())
    };
    assert_eq!(start("end").1(), FleetEnd { code: 0, problems: vec![] });
    for host in [0, 1] {
        let text = place.written(host, "given");
        assert!(text.ends_with(&format!("word {}\n", hex(b"a 'b' $c"))), "{text}");
        assert!(text.contains("key 64\n"), "{text}");
        fs::remove_file(place.file(host, "given")).unwrap();
    }
    let (handle, end) = start("wait");
    [0, 1].iter().for_each(|host| drop(place.written(*host, "given")));
    handle.stop(Signal::INT);
    assert_eq!(end().code, 130);
    [0, 1].iter().for_each(|host| assert_eq!(place.written(*host, "orders"), "SIGINT\n"));
}
