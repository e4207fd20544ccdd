//! The command line of a host's agent: a plan said again in the words of `drumline run`.

use std::ffi::OsString;
use std::time::Duration;

use crate::{LaunchPlan, LocalRankArg, LogPlan, NumaBinding, Program, RdzvConf, Rendezvous, signal_name};

/// All that follows `drumline` for the agent of the host that has this node rank and so many ranks.
pub(super) fn agent_args(plan: &LaunchPlan, node_rank: usize, nproc: usize) -> Vec<OsString> {
    // Each field by name: a new one must be handed on, or be left out on purpose.
    let LaunchPlan {
        nodes,
        node_rank: _,
        nproc: _,
        role,
        run_id,
        rendezvous,
        join_timeout,
        contact,
        // Of the leader's own host; each of the others finds out its own.
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
        // In the environment, as CUDA_VISIBLE_DEVICES.
        devices: _,
        omp,
        faults,
        debug_rank,
        fleet: _,
        slurm_step: _,
        led: _,
    } = plan;
    let signals: Vec<_> = signals.iter().map(|signal| signal_name(signal.as_raw())).collect();
    let mut words = command(*local_rank_arg);
    words.push("--led".into());
    words.add("nnodes", nodes.to_string());
    words.add("node-rank", node_rank.to_string());
    words.add("nproc-per-node", nproc.to_string());
    words.meet(rendezvous, &RdzvConf { join_timeout: *join_timeout, ..contact.conf() });
    words.add("host-timeout", seconds(contact.host_timeout));
    words.add("rdzv-id", run_id);
    words.add("role", role);
    words.add("max-restarts", max_restarts.to_string());
    words.add("monitor-interval", seconds(*monitor_interval));
    words.add("shutdown-timeout", seconds(*shutdown_timeout));
    words.add("signals-to-handle", signals.join(","));
    words.output(logs);
    words.add_some("numa-binding", numa.map(|numa| binding(numa).to_string()));
    words.add_if("virtual-local-rank", *virtual_local_rank);
    words.add_some("omp", omp.map(|omp| omp.to_string()));
    faults.iter().for_each(|fault| words.add("fault", fault.to_string()));
    words.add_some("debug-rank", debug_rank.as_ref().map(|held| held.rank.to_string()));
    words.program(program);
    words.extend(args.iter().cloned());
    words
}

fn command(local_rank_arg: Option<LocalRankArg>) -> Vec<OsString> {
    let words: &[&str] = match local_rank_arg {
        None => &["run"],
        Some(LocalRankArg::Dash) => &["launch", "--rank-spelling=dash"],
        Some(LocalRankArg::Underscore) => &["launch", "--rank-spelling=underscore"],
    };
    words.iter().map(OsString::from).collect()
}

/// A command line that is being written.
trait Words {
    fn add(&mut self, flag: &str, value: impl Into<OsString>);
    fn add_some(&mut self, flag: &str, value: Option<impl Into<OsString>>);
    fn add_if(&mut self, flag: &str, given: bool);
    fn meet(&mut self, rendezvous: &Rendezvous, fixed: &RdzvConf);
    fn settings(&mut self, conf: &RdzvConf);
    fn output(&mut self, logs: &LogPlan);
    fn program(&mut self, program: &Program);
}

impl Words for Vec<OsString> {
    /// In one word: a value may be empty or begin with a dash.
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

    /// The settings of nodes that come and go are in the plan; `fixed` are those of a fixed number of them.
    fn meet(&mut self, rendezvous: &Rendezvous, fixed: &RdzvConf) {
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
                // Which host has the store is in the endpoint; no two of them may claim it.
                self.settings(&RdzvConf { is_host: None, ..conf.clone() });
            }
        }
    }

    fn settings(&mut self, conf: &RdzvConf) {
        self.add_some("rdzv-conf", Some(conf.to_string()).filter(|_| *conf != RdzvConf::default()));
    }

    fn output(&mut self, logs: &LogPlan) {
        // The prefix's pattern travels in its variable.
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
        // The interpreter travels in its variable.
        let (flag, name) = match program {
            Program::Python { script, .. } => (None, script),
            Program::PythonModule { module, .. } => (Some("--module"), module),
            Program::Executable(name) => (Some("--no-python"), name),
            Program::RunPath { script, .. } => (Some("--run-path"), script),
        };
        self.extend(flag.map(OsString::from));
        self.push("--".into());
        self.push(name.clone());
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
