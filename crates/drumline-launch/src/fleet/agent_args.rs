//! The command line of a host's agent: turns a plan back into arguments of `drumline run`.

use std::ffi::OsString;
use std::time::Duration;

use crate::{LaunchPlan, LocalRankArg, LogPlan, NumaBinding, Program, RdzvConf, Rendezvous, signal_name};

/// The arguments of `drumline` for the agent of the host with this node rank and number of ranks.
pub(super) fn agent_args(plan: &LaunchPlan, node_rank: usize, nproc: usize) -> Vec<OsString> {
    // Each field by name, so that the compiler asks about a new one: pass it on, or leave it out on purpose.
    let LaunchPlan {
        nodes,
        node_rank: _,
        nproc: _,
        role,
        run_id,
        rendezvous,
        join_timeout,
        contact,
        // This belongs to the leader's own host; each other host finds its own.
        local_addr: _,
        max_restarts,
        monitor_interval,
        program,
        args,
        local_rank_arg,
        logs,
        signals,
        shutdown_timeout,
        numa,
        virtual_local_rank,
        // Sent in the environment, as CUDA_VISIBLE_DEVICES.
        devices: _,
        omp,
        faults,
        debug_rank,
        fleet: _,
        slurm_step: _,
        led: _,
    } = plan;
    let signals: Vec<_> = signals.iter().map(|signal| signal_name(signal.as_raw())).collect();
    let mut args_list = command(*local_rank_arg);
    args_list.push("--led".into());
    args_list.add("nnodes", nodes.to_string());
    args_list.add("node-rank", node_rank.to_string());
    args_list.add("nproc-per-node", nproc.to_string());
    args_list.rendezvous(rendezvous, &RdzvConf { join_timeout: *join_timeout, ..contact.conf() });
    args_list.add("host-timeout", seconds(contact.host_timeout));
    args_list.add("rdzv-id", run_id);
    args_list.add("role", role);
    args_list.add("max-restarts", max_restarts.to_string());
    args_list.add("monitor-interval", seconds(*monitor_interval));
    args_list.add("shutdown-timeout", seconds(*shutdown_timeout));
    args_list.add("signals-to-handle", signals.join(","));
    args_list.output(logs);
    args_list.add_some("numa-binding", numa.map(|numa| binding(numa).to_string()));
    args_list.add_if("virtual-local-rank", *virtual_local_rank);
    args_list.add_some("omp", omp.map(|omp| omp.to_string()));
    faults.iter().for_each(|fault| args_list.add("fault", fault.to_string()));
    args_list.add_some("debug-rank", debug_rank.as_ref().map(|held| held.rank.to_string()));
    args_list.program(program);
    args_list.extend(args.iter().cloned());
    args_list
}

fn command(local_rank_arg: Option<LocalRankArg>) -> Vec<OsString> {
    let args_list: &[&str] = match local_rank_arg {
        None => &["run"],
        Some(LocalRankArg::Dash) => &["launch", "--rank-spelling=dash"],
        Some(LocalRankArg::Underscore) => &["launch", "--rank-spelling=underscore"],
    };
    args_list.iter().map(OsString::from).collect()
}

/// A command line under construction.
trait ArgList {
    fn add(&mut self, flag: &str, value: impl Into<OsString>);
    fn add_some(&mut self, flag: &str, value: Option<impl Into<OsString>>);
    fn add_if(&mut self, flag: &str, given: bool);
    fn rendezvous(&mut self, rendezvous: &Rendezvous, fixed: &RdzvConf);
    fn settings(&mut self, conf: &RdzvConf);
    fn output(&mut self, logs: &LogPlan);
    fn program(&mut self, program: &Program);
}

impl ArgList for Vec<OsString> {
    /// As one argument, because a value may be empty or begin with a dash.
    fn add(&mut self, flag: &str, value: impl Into<OsString>) {
        let mut word = OsString::from(format!("--{flag}="));
        word.push(value.into());
        self.push(word);
    }

    fn add_some(&mut self, flag: &str, value: Option<impl Into<OsString>>) {
        value.into_iter().for_each(|value| self.add(flag, value));
    }

    fn add_if(&mut self, flag: &str, given: bool) {
        self.extend(given.then(|| format!("--{flag}").into()));
    }

    /// Adds the rendezvous. For an elastic job, its settings are in the plan; `fixed` are those of a fixed number of
    /// nodes.
    fn rendezvous(&mut self, rendezvous: &Rendezvous, fixed: &RdzvConf) {
        match rendezvous {
            Rendezvous::Standalone => self.add_if("standalone", true),
            Rendezvous::Static { addr, port } => {
                self.add("master-addr", addr);
                self.add("master-port", port.to_string());
                self.settings(fixed);
            }
            Rendezvous::Dynamic { endpoint, conf } => {
                self.add("rdzv-backend", "c10d");
                self.add("rdzv-endpoint", endpoint);
                // The endpoint says which host has the store; no two hosts may claim it.
                self.settings(&RdzvConf { is_host: None, ..conf.clone() });
            }
        }
    }

    fn settings(&mut self, conf: &RdzvConf) {
        self.add_some("rdzv-conf", Some(conf.to_string()).filter(|_| *conf != RdzvConf::default()));
    }

    fn output(&mut self, logs: &LogPlan) {
        // The prefix's pattern is sent in its variable.
        let LogPlan { dir, redirects, tee, filter, quiet_ranks, prefix: _, duplicates, bars: _ } = logs;
        self.add_some("log-dir", dir.as_ref());
        self.add_some("redirects", Some(redirects.to_string()).filter(|_| !redirects.is_none()));
        self.add_some("tee", Some(tee.to_string()).filter(|_| !tee.is_none()));
        let ranks = |set: &std::collections::BTreeSet<usize>| {
            set.iter().map(usize::to_string).collect::<Vec<_>>().join(",")
        };
        self.add_some("local-ranks-filter", filter.as_ref().map(ranks));
        self.add_if("quiet-ranks", *quiet_ranks);
        for (flag, texts) in [
            ("duplicate-stdout-filters", &duplicates.stdout),
            ("duplicate-stderr-filters", &duplicates.stderr),
        ] {
            let list: Vec<_> = texts.iter().map(|text| text.replace(',', ",,")).collect();
            self.add_some(flag, Some(list.join(",")).filter(|list| !list.is_empty()));
        }
    }

    fn program(&mut self, program: &Program) {
        // The interpreter is sent in its variable.
        let (flag, name) = match program {
            Program::Python { script, .. } => (None, script),
            Program::PythonModule { module, .. } => (Some("--module"), module),
            Program::PythonCommand { interpreter, .. } => (None, interpreter),
            Program::Executable(name) => (Some("--no-python"), name),
            Program::RunPath { script, .. } => (Some("--run-path"), script),
        };
        self.extend(flag.map(OsString::from));
        self.push("--".into());
        self.push(name.clone());
        if let Program::PythonCommand { words, .. } = program {
            self.extend(words.iter().cloned());
        }
    }
}

fn seconds(duration: Duration) -> String {
    duration.as_secs_f64().to_string()
}

fn binding(numa: NumaBinding) -> &'static str {
    match numa {
        NumaBinding::None => "none",
        NumaBinding::Node => "node",
        NumaBinding::Socket => "socket",
        NumaBinding::Exclusive => "exclusive",
        NumaBinding::CoreComplex => "core-complex",
    }
}
