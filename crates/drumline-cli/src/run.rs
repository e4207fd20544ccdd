//! `drumline run`: starts this node's ranks of a program.
//!
//! ```text
//!   args.rs (as typed) ─plan.rs─▶ LaunchPlan ─┬─ --dry-run ─▶ dry_run.rs: told on stdout
//!         host.rs (this node) ──▲             └─ else ──────▶ workers, watched to their end
//! ```

mod args;
mod dry_run;
mod error;
mod flags;
mod host;
mod hosts;
mod nproc;
mod plan;
#[cfg(test)]
mod plan_table;

use std::io::Write;

use anyhow::bail;
use drumline_launch::{LaunchPlan, LocalRankArg, Output};
use drumline_rendezvous::worker_env;

pub(crate) use args::RunArgs;
pub(crate) use flags::{as_torchrun, variable_at_fault};
use host::Host;

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
    if args.dry_run {
        return Ok(std::io::stdout().write_all(dry_run::describe(&plan, visible.as_deref()).as_bytes())?);
    }
    start(&plan, visible.as_deref())
}

fn start(plan: &LaunchPlan, visible: Option<&str>) -> anyhow::Result<()> {
    if plan.nodes.max > 1 || plan.fleet.is_some() {
        bail!(
            "jobs of more than one node cannot be started yet; try --dry-run to see the plan, or --nnodes 1"
        );
    }
    if let Some(flag) = not_carried_out(plan) {
        bail!("{flag} cannot be carried out yet; try without it, or --dry-run to see the plan");
    }
    let report = plan.start_alone(visible, Output::Prefix)?.wait();
    if !report.is_success() {
        bail!("{}", report.to_string().trim_end());
    }
    Ok(())
}

/// A flag that was given and that workers of a single node do not heed: refused rather than silently left out.
fn not_carried_out(plan: &LaunchPlan) -> Option<&'static str> {
    let logs = &plan.logs;
    let asked = [
        ("--max-restarts", plan.max_restarts > 0),
        ("--redirects", !logs.redirects.is_none()),
        ("--tee", !logs.tee.is_none()),
        ("--local-ranks-filter", logs.filter.is_some()),
        ("--quiet-ranks", logs.quiet_ranks),
        ("--duplicate-stdout-filters", !plan.duplicates.stdout.is_empty()),
        ("--duplicate-stderr-filters", !plan.duplicates.stderr.is_empty()),
        ("--numa-binding", plan.numa.is_some()),
        ("--debug-rank", plan.debug_rank.is_some()),
    ];
    asked.into_iter().find(|(_, asked)| *asked).map(|(flag, _)| flag)
}
