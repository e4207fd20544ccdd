//! `drumline run`: starts this node's ranks of a program.
//!
//! ```text
//!   args.rs (as typed) ─plan.rs─▶ LaunchPlan ─┬─ --dry-run ─▶ dry_run.rs: printed to stdout
//!         host.rs (this node) ──▲             └─ else ──────▶ agent (drumline-launch), until the job ends
//! ```

mod args;
mod deepspeed;
mod dry_run;
mod error;
mod flags;
mod host;
mod hosts;
mod leading;
mod local_rank;
mod nproc;
mod on_host;
mod plan;
#[cfg(test)]
mod plan_table;
mod site;
mod slurm;

use std::io::Write;
use std::net::ToSocketAddrs;

use anyhow::anyhow;
use drumline_launch::membership::Reason;
use drumline_launch::{
    AgentOptions, FailureReport, LaunchPlan, LedBy, LocalRankArg, Outcome, Rendezvous, led, run_agent,
    split_endpoint,
};
use drumline_rendezvous::worker_env;

use crate::KEEPER;
use crate::errors::{ExitCodeOnly, Stopped, print_line};

pub(crate) use args::RunArgs;
pub(crate) use error::PlanError;
pub(crate) use flags::{as_torchrun, hidden_if_without_effect, variable_at_fault};
use host::Host;
pub(crate) use on_host::on_host;

/// The size of a job, as this node sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) nodes: usize,
    pub(crate) nproc: usize,
}

impl Extent {
    /// All ranks, if every node has as many as this one.
    pub(crate) fn num_ranks(self) -> usize {
        self.nodes * self.nproc
    }
}

/// The size of the job that the command line describes; an error if it is wrong.
pub(crate) fn extent(args: &RunArgs) -> Result<Extent, PlanError> {
    let env = |name: &str| std::env::var_os(name);
    let host = Host::found(args.hostfile.as_deref(), &env)?;
    let plan = args.plan(&host)?;
    let hosts = plan.fleet.as_ref().map_or(1, |fleet| fleet.hosts.len());
    Ok(Extent { nodes: plan.nodes.max.max(hosts), nproc: plan.nproc })
}

/// Runs `drumline run`; an error if a rank failed.
pub(crate) fn run_program(args: &RunArgs) -> anyhow::Result<()> {
    if let Some(remark) = args.local_rank_remark().filter(|_| !args.dry_run) {
        print_line(&format!("note: {remark}"));
    }
    run(args, None)
}

/// Runs the command line; an error if a rank failed.
pub(crate) fn run(args: &RunArgs, local_rank_arg: Option<LocalRankArg>) -> anyhow::Result<()> {
    // Every node reports its errors: what is wrong on one of them need not be wrong on the first.
    let env = |name: &str| std::env::var_os(name);
    let host = Host::found(args.hostfile.as_deref(), &env)?;
    let plan = args.plan_with(&host, local_rank_arg)?;
    for remark in args.remarks() {
        print_line(&format!("note: {remark}"));
    }
    let visible = host.text(worker_env::CUDA_VISIBLE_DEVICES);
    if let Some(fleet) = &plan.fleet {
        let site = site::site(fleet, &host)?;
        if !args.dry_run {
            return leading::lead(&plan, fleet, &site);
        }
        return Ok(std::io::stdout().write_all(dry_run::describe_fleet(&plan, fleet, &site).as_bytes())?);
    }
    if args.dry_run {
        // The plan of several nodes may be looked at elsewhere.
        if plan.nodes.max == 1 {
            check_script(&plan)?;
        }
        return Ok(std::io::stdout().write_all(dry_run::describe(&plan, visible.as_deref()).as_bytes())?);
    }
    start(&plan, visible)
}

/// Returns an error if the Python script to run does not exist on this node.
fn check_script(plan: &LaunchPlan) -> Result<(), PlanError> {
    match plan.program.missing_script() {
        Some(script) => Err(PlanError::NoScript(script.to_string_lossy().into())),
        None => Ok(()),
    }
}

fn start(plan: &LaunchPlan, visible: Option<String>) -> anyhow::Result<()> {
    check_script(plan)?;
    if plan.led == LedBy::Nobody && needs_key(plan) && !has_key(|name| std::env::var_os(name).is_some()) {
        return Err(PlanError::NoKey.into());
    }
    let say = |text: &str| print_line(&format!("note: {text}"));
    if let Some(threads) = plan.chosen_threads().filter(|_| plan.node_rank == 0) {
        say(&format!("OMP_NUM_THREADS={threads} for each of {} ranks; --omp N sets another", plan.nproc));
    }
    // This path works even if the program's file is replaced or deleted while the job runs.
    let keeper = vec!["/proc/self/exe".into(), KEEPER.into()];
    let (key, led) = match plan.led {
        LedBy::Nobody => (None, None),
        LedBy::Stdin => led::take(std::io::stdin()).map(|(key, led)| (Some(key), Some(led)))?,
    };
    let options = AgentOptions { keeper, visible, key, led, say: Box::new(say) };
    match run_agent(plan, options)? {
        Outcome::Success => Ok(()),
        Outcome::Failure { report: None, why } if is_reported_elsewhere(plan, &why) => {
            Err(ExitCodeOnly(1).into())
        }
        Outcome::Failure { report, why } => Err(failed(report.as_deref(), &why)),
        Outcome::Stopped(signal) => Err(Stopped(signal).into()),
    }
}

/// Whether nodes meet at an address of another machine. A name that cannot be resolved counts as one.
fn needs_key(plan: &LaunchPlan) -> bool {
    let host = match &plan.rendezvous {
        Rendezvous::Static { addr, .. } => addr.clone(),
        Rendezvous::Dynamic { endpoint, .. } => {
            split_endpoint(endpoint, Some(0)).map_or_else(|_| String::new(), |(host, _)| host)
        }
        Rendezvous::Standalone => return false,
    };
    let is_loopback = || {
        let found = (host.as_str(), 0).to_socket_addrs();
        found.is_ok_and(|mut found| found.all(|address| address.ip().is_loopback()))
    };
    plan.nodes.max > 1 && !is_loopback()
}

fn has_key(is_set: impl Fn(&str) -> bool) -> bool {
    [worker_env::DRUMLINE_JOB_KEY_FD, worker_env::DRUMLINE_JOB_KEY_FILE].into_iter().any(is_set)
}

/// Whether another agent reports the failure to the same user: the node on which a rank failed, or else the first.
fn is_reported_elsewhere(plan: &LaunchPlan, why: &Reason) -> bool {
    let shares_output = plan.led == LedBy::Stdin || plan.slurm_step.is_some();
    shares_output
        && match why {
            Reason::OutOfRestarts { failure, .. } | Reason::CrashLoop { failure, .. } => {
                !failure.ran_for.is_zero() || plan.node_rank != 0
            }
            // Only this agent knows these.
            Reason::StoreLost { .. } | Reason::NodeRankTaken { .. } | Reason::AskedToLeave => false,
            _ => plan.node_rank != 0,
        }
}

/// What happened here, and why the job ended if that is something else.
fn failed(report: Option<&FailureReport>, why: &Reason) -> anyhow::Error {
    let Some(report) = report else {
        return match why {
            // It did not even start: the failure's own text is enough.
            Reason::OutOfRestarts { failure, .. } if failure.ran_for.is_zero() => {
                anyhow!("{}", failure.what)
            }
            _ => anyhow!("the job failed: {why}"),
        };
    };
    let text = report.to_string();
    match why {
        Reason::OutOfRestarts { failure, max_restarts: 0 } if report.includes(failure.rank) => {
            anyhow!("{}", text.trim_end())
        }
        _ => anyhow!("the job failed: {why}\n{}", text.trim_end()),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use drumline_launch::membership::WorkerFailure;
    use drumline_launch::{Exit, JobReport, RankReport};

    use super::*;

    /// The message if rank 3, whose last output names rank 1, failed on this node, and the job ended because `rank` failed.
    fn message(rank: usize) -> String {
        let here = RankReport {
            rank: 3,
            pid: 77,
            exit: Exit::Code(1),
            core_dumped: false,
            ended_after: Duration::from_secs(1),
            stdout: Vec::new(),
            stderr: b"heard from rank 1 last".to_vec(),
        };
        let job = JobReport { ranks: vec![here], root_cause: Some(3), stopped: None };
        let report = FailureReport::new(&job, &[]).unwrap();
        let (host, what) = ("node0".to_string(), "exit code 1".to_string());
        let failure = WorkerFailure { round: 1, rank, host, ran_for: Duration::from_secs(1), what };
        failed(Some(&report), &Reason::OutOfRestarts { failure, max_restarts: 0 }).to_string()
    }

    #[test]
    fn a_key_is_needed_where_nodes_meet_at_an_address_that_others_can_reach() {
        let plan = |nodes, rendezvous| LaunchPlan {
            nodes: drumline_launch::NodeRange::exactly(nodes),
            rendezvous,
            ..LaunchPlan::new(drumline_launch::Program::Executable("a".into()))
        };
        let at = |addr: &str| Rendezvous::Static { addr: addr.to_string(), port: 1 };
        let dynamic =
            |endpoint: &str| Rendezvous::Dynamic { endpoint: endpoint.to_string(), conf: Default::default() };
        for (expected, nodes, rendezvous) in [
            (true, 2, at("192.0.2.2")),
            (true, 2, at("no-such-host.invalid")),
            (true, 2, dynamic("192.0.2.2:29400")),
            (false, 2, at("127.0.0.1")),
            (false, 2, at("localhost")),
            (false, 2, at("::1")),
            (false, 2, dynamic("localhost:29400")),
            (false, 1, at("192.0.2.2")),
            (false, 1, Rendezvous::Standalone),
        ] {
            assert_eq!(needs_key(&plan(nodes, rendezvous.clone())), expected, "{nodes} {rendezvous:?}");
        }
        assert!(!has_key(|_| false) && has_key(|name| name == "DRUMLINE_JOB_KEY_FILE"));
    }

    #[test]
    fn another_nodes_failure_is_reported_next_to_our_own() {
        let other = message(1);
        assert!(other.starts_with("the job failed: ") && other.contains("rank 1 last"), "{other}");
        let own = message(3);
        assert!(own.starts_with("rank 3 ") && own.contains("rank 1 last"), "control: {own}");
    }
}
