//! `drumline run`: starts this node's ranks of a program.
//!
//! ```text
//!   args.rs (as typed) ─plan.rs─▶ LaunchPlan ─┬─ --dry-run ─▶ dry_run.rs: told on stdout
//!         host.rs (this node) ──▲             └─ else ──────▶ workers, watched to their end
//! ```

mod args;
mod deepspeed;
mod dry_run;
mod error;
mod flags;
mod host;
mod hosts;
mod leading;
mod nproc;
mod on_host;
mod plan;
#[cfg(test)]
mod plan_table;
mod site;

use std::io::Write;

use anyhow::bail;
use drumline_launch::{Evidence, FailureReport, LaunchPlan, LocalRankArg, LogFolder, OomSources, OomWatch};
use drumline_rendezvous::{Hello, Role, worker_env};

pub(crate) use args::RunArgs;
pub(crate) use flags::{as_torchrun, variable_at_fault};
use host::Host;
pub(crate) use on_host::on_host;

/// Carries out the command line; an error if a rank failed.
pub(crate) fn run(args: &RunArgs, local_rank_arg: Option<LocalRankArg>) -> anyhow::Result<()> {
    // Told by every node: what is wrong on one of them need not be so on the first.
    let env = |name: &str| std::env::var_os(name);
    let host = Host::found(args.hostfile.as_deref(), &env)?;
    let plan = args.plan_with(&host, local_rank_arg)?;
    for remark in args.remarks() {
        eprintln!("note: {remark}");
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
        return Ok(std::io::stdout().write_all(dry_run::describe(&plan, visible.as_deref()).as_bytes())?);
    }
    start(&plan, visible.as_deref())
}

fn start(plan: &LaunchPlan, visible: Option<&str>) -> anyhow::Result<()> {
    if plan.nodes.max > 1 {
        bail!(
            "jobs of more than one node cannot be started yet; try --dry-run to see the plan, or --nnodes 1"
        );
    }
    if let Some(flag) = not_carried_out(plan) {
        bail!("{flag} cannot be carried out yet; try without it, or --dry-run to see the plan");
    }
    let folder = LogFolder::create(plan.logs.clone(), &plan.run_id, &plan.role)?;
    let logs = folder.attempt(0, plan.nproc)?;
    let mut watch = OomWatch::start(&OomSources::default());
    let report = plan.start_alone(visible, &logs)?.wait();
    if report.is_success() {
        return Ok(());
    }
    let host = Hello::new(Role::Store).host;
    let evidence: Vec<_> = report
        .ranks
        .iter()
        .map(|rank| {
            let at = Evidence::at(rank.rank, rank.rank, &host);
            at.gather(rank, logs.error_file(rank.rank).as_deref(), &mut watch)
        })
        .collect();
    match FailureReport::new(&report, &evidence) {
        Some(failure) => bail!("{}", failure.to_string().trim_end()),
        None => bail!("{}", report.to_string().trim_end()),
    }
}

/// A flag that was given and that workers of a single node do not heed: refused rather than silently left out.
fn not_carried_out(plan: &LaunchPlan) -> Option<&'static str> {
    let asked = [
        ("--max-restarts", plan.max_restarts > 0),
        ("--duplicate-stdout-filters", !plan.duplicates.stdout.is_empty()),
        ("--duplicate-stderr-filters", !plan.duplicates.stderr.is_empty()),
        ("--numa-binding", plan.numa.is_some()),
        ("--debug-rank", plan.debug_rank.is_some()),
    ];
    asked.into_iter().find(|(_, asked)| *asked).map(|(flag, _)| flag)
}
