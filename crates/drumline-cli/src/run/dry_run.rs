//! `--dry-run`: the whole plan as text, for people.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fmt::Write;
use std::net::Ipv4Addr;

use drumline_launch::placing::{self, Cores, Topology};
use drumline_launch::{
    Fleet, HostCommand, LaunchPlan, Meeting, Place, Rendezvous, Site, shell, signal_name, worker_environment,
};
use drumline_rendezvous::worker_env;

/// Shown for a port or address that is known only once the job runs.
const LATER: &str = "(when the job starts)";
/// The round that is shown.
const FIRST_ROUND: u64 = 1;

/// The plan, as this node would run it. `visible` is the launcher's `CUDA_VISIBLE_DEVICES`.
pub(super) fn describe(plan: &LaunchPlan, visible: Option<&str>) -> String {
    let mut text = format!("plan ({} x {} ranks); nothing is started\n", plan.nodes, plan.nproc);
    for (name, value) in facts(plan) {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "  {name:<16} {value}");
    }
    let bound = placing::cores(plan, &Topology::here(), &|name| std::env::var_os(name));
    let path = std::env::var_os("PATH");
    let missing = plan.program.missing_executable(path.as_deref());
    let problems = bound.as_ref().err().map(ToString::to_string).into_iter().chain(missing);
    for problem in problems {
        let _ = writeln!(text, "  {:<16} {problem}", "cannot start");
    }
    let bound = bound.unwrap_or_else(|_| vec![None; plan.nproc]);
    for (local_rank, cores) in bound.iter().enumerate() {
        let place = plan.place(local_rank, plan.node_rank.min(plan.nodes.max - 1), plan.nodes.max);
        text.push_str(&worker(plan, &place, cores.as_ref(), visible));
    }
    text
}

/// The same for hosts on which launchers are started: each host's command, and what it runs there.
pub(super) fn describe_fleet(plan: &LaunchPlan, fleet: &Fleet, site: &Site) -> String {
    let (num_hosts, num_ranks) = (fleet.hosts.len(), fleet.num_ranks());
    let mut text = format!("plan ({num_hosts} hosts, {num_ranks} ranks); nothing is started\n");
    for (name, value) in facts(plan) {
        let _ = writeln!(text, "  {name:<16} {value}");
    }
    for (node_rank, HostCommand { host, program, args, order }) in
        fleet.commands(plan, site).iter().enumerate()
    {
        let first: usize = (0..node_rank).map(|node_rank| fleet.ranks_on(node_rank)).sum();
        let last = first + fleet.ranks_on(node_rank) - 1;
        let _ = writeln!(text, "host {host} (node {node_rank}, ranks {first} to {last})");
        let _ = writeln!(text, "  $ {}", line(program, args));
        let _ = writeln!(
            text,
            "  which gets on stdin, with the job key, the order to run in {}",
            order.dir.display()
        );
        for (name, value) in &order.env {
            let _ = writeln!(text, "    {}={}", name.display(), value.display());
        }
        let _ = writeln!(text, "    $ {}", line(&order.program, &order.args));
    }
    text
}

fn line(program: &OsStr, args: &[OsString]) -> String {
    let words = std::iter::once(program).chain(args.iter().map(OsString::as_os_str));
    shell::line(words).to_string_lossy().into_owned()
}

fn facts(plan: &LaunchPlan) -> Vec<(&'static str, String)> {
    let mut facts = vec![
        ("nodes", nodes(plan)),
        ("meet", plan.rendezvous.to_string()),
        ("job", plan.run_id.clone()),
        ("role", plan.role.clone()),
        ("restarts", plan.max_restarts.to_string()),
        ("silent host", format!("waited for {:?}", plan.contact.host_timeout)),
        ("stop", format!("SIGTERM, {:?} later SIGKILL", plan.shutdown_timeout)),
        (
            "signals",
            plan.signals.iter().map(|signal| signal_name(signal.as_raw())).collect::<Vec<_>>().join(" "),
        ),
    ];
    facts.extend(plan.local_addr.clone().map(|addr| ("local address", addr)));
    facts.extend(plan.logs.dir.as_ref().map(|dir| ("log folder", dir.display().to_string())));
    let streams = [("redirects", &plan.logs.redirects), ("tee", &plan.logs.tee)];
    facts.extend(
        streams.into_iter().filter(|(_, std)| !std.is_none()).map(|(name, std)| (name, std.to_string())),
    );
    facts.extend(plan.logs.filter.as_ref().map(|ranks| ("shown ranks", format!("{ranks:?}"))));
    facts.extend(plan.logs.quiet_ranks.then(|| ("shown", "rank 0 only".to_string())));
    facts.extend(plan.numa.map(|numa| ("numa binding", format!("{numa:?}"))));
    facts.extend(plan.faults.iter().map(|fault| ("fault", fault.to_string())));
    facts.extend(plan.debug_rank.as_ref().map(|held| ("held for debugger", format!("rank {}", held.rank))));
    facts
}

fn nodes(plan: &LaunchPlan) -> String {
    match plan.rendezvous {
        Rendezvous::Dynamic { .. } => {
            format!("{}; ranks are assigned when the nodes meet, here as if all came", plan.nodes)
        }
        _ if plan.fleet.is_some() => plan.nodes.to_string(),
        _ => {
            let source = plan.slurm_step.as_ref().map(|step| format!(", from Slurm (step {step})"));
            format!("{}{}; this is node {}", plan.nodes, source.unwrap_or_default(), plan.node_rank)
        }
    }
}

fn worker(plan: &LaunchPlan, place: &Place, cores: Option<&Cores>, visible: Option<&str>) -> String {
    let (program, args) = plan.command(place);
    let mut text = format!("rank {} (local rank {} of {})\n", place.rank, place.local_rank, plan.nproc);
    for (name, value) in environment(plan, place, visible) {
        let _ = writeln!(text, "  {}={}", name.display(), value.display());
    }
    if let Some(cores) = cores {
        let _ = writeln!(text, "  on cores {cores}");
    }
    let _ = writeln!(text, "  $ {}", line(&program, &args));
    text
}

/// What is set in addition to the launcher's own environment: the last value of each name, sorted by name.
fn environment(plan: &LaunchPlan, place: &Place, visible: Option<&str>) -> BTreeMap<OsString, OsString> {
    let master = match &plan.rendezvous {
        // The launchers of several nodes meet at that port; what rank 0 hosts gets another one.
        Rendezvous::Static { addr, port } if plan.nodes.max > 1 || *port == 0 => {
            [addr.clone(), LATER.to_string()]
        }
        Rendezvous::Static { addr, port } => [addr.clone(), port.to_string()],
        _ if plan.nodes.max == 1 => [Ipv4Addr::LOCALHOST.to_string(), LATER.to_string()],
        _ => [LATER.to_string(), LATER.to_string()],
    };
    let names = [worker_env::MASTER_ADDR, worker_env::MASTER_PORT];
    let mut env = worker_environment(place, &Meeting { round: FIRST_ROUND, ..Meeting::default() });
    let error_file = plan.logs.wants_folder().then_some(worker_env::TORCHELASTIC_ERROR_FILE);
    let later = [worker_env::DRUMLINE_STORE, worker_env::DRUMLINE_JOB_KEY_FD].into_iter().chain(error_file);
    env.extend(later.map(|name| (name.into(), Some(LATER.into()))));
    env.extend(names.into_iter().zip(master).map(|(name, value)| (name.into(), Some(value.into()))));
    env.extend(plan.environment(place, visible));
    env.into_iter().filter_map(|(name, value)| Some((name, value?))).collect()
}
