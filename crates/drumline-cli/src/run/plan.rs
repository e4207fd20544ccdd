//! From the command line to a plan. Everything is checked and nothing is touched: what the plan must know about this node comes
//! in as a [`Host`].

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::time::Duration;

use drumline_launch::{
    Bars, Fleet, HeldRank, HostTimeout, LaunchPlan, LedBy, LineFilters, LocalRankArg, LogPlan, NodeRange,
    Program, Rendezvous, Std, parse_seconds, parse_signals, split_endpoint,
};
use drumline_rendezvous::fault::{Fault, When};
use drumline_rendezvous::worker_env;

use super::args::{RunArgs, StartMethod};
use super::error::PlanError;
use super::host::Host;
use super::hosts::Hosts;
use super::nproc::Nproc;
use super::slurm::Step;

const MASTER_ADDR: &str = "127.0.0.1";
const MASTER_PORT: u16 = 29_500;
/// The default port of `--rdzv-backend c10d`.
const C10D_PORT: u16 = 29_400;
/// The default of `--rdzv-id`.
const NO_ID: &str = "none";
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(30);
/// Checking the nodes' state more often than this would only keep a core busy.
const SHORTEST_INTERVAL: Duration = Duration::from_millis(10);

impl RunArgs {
    /// What these arguments mean on this node, or the first error in them.
    pub(crate) fn plan(&self, host: &Host<'_>) -> Result<LaunchPlan, PlanError> {
        let hosts = Hosts::chosen(self, host)?;
        let step = Step::taken(self, host)?;
        let of_step = step.as_ref().map(|step| step.nodes);
        let nodes = hosts.nodes.or(self.nnodes).or(of_step).unwrap_or(NodeRange::exactly(1));
        let rendezvous = match &step {
            Some(step) => step.rendezvous.clone(),
            None => self.rendezvous(nodes, &hosts)?,
        };
        let of_step = step.as_ref().map(|step| step.node_rank);
        let node_rank = self.node_rank.or(hosts.node_rank).or(of_step).unwrap_or(0);
        if matches!(rendezvous, Rendezvous::Static { .. }) && node_rank >= nodes.max {
            return Err(PlanError::NodeRank { rank: node_rank, nodes: nodes.max });
        }
        let nproc = match hosts.nproc {
            Some(slots) => slots,
            None => self.nproc_per_node.unwrap_or(Nproc::Count(1)).on(host)?,
        };
        let (program, args) = self.program(host)?;
        Ok(LaunchPlan {
            nodes,
            node_rank,
            nproc,
            role: self.role.clone(),
            run_id: self.run_id(host, step.as_ref()),
            rendezvous,
            join_timeout: self.rdzv_conf.join_timeout,
            contact: self.rdzv_conf.contact(self.host_timeout(host)?),
            local_addr: self.local_addr.clone(),
            max_restarts: self.max_restarts,
            monitor_interval: self.monitor_interval.max(SHORTEST_INTERVAL),
            program,
            args,
            local_rank_arg: None,
            logs: LogPlan { bars: bars(nodes), ..self.logs(host)? },
            signals: parse_signals(&self.signals_to_handle).map_err(PlanError::Signals)?,
            shutdown_timeout: self.shutdown_timeout(host)?,
            numa: self.numa_binding.map(Into::into),
            virtual_local_rank: self.virtual_local_rank,
            devices: hosts.devices,
            omp: self.threads()?,
            faults: self.faults(world(nodes, nproc, hosts.fleet.as_ref()))?,
            debug_rank: self.held_rank(world(nodes, nproc, hosts.fleet.as_ref()), host)?,
            fleet: hosts.fleet,
            slurm_step: step.map(|step| step.name),
            led: if self.led { LedBy::Stdin } else { LedBy::Nobody },
        })
    }

    /// The same for `drumline launch`, whose programs may get their local rank as an argument.
    pub(crate) fn plan_with(
        &self,
        host: &Host<'_>,
        local_rank_arg: Option<LocalRankArg>,
    ) -> Result<LaunchPlan, PlanError> {
        match local_rank_arg {
            Some(_) if self.no_python => Err(PlanError::NoPythonLocalRank),
            _ => Ok(LaunchPlan { local_rank_arg, ..self.plan(host)? }),
        }
    }

    /// Remarks about arguments that have no effect here, or hide something.
    pub(crate) fn remarks(&self) -> Vec<String> {
        let dynamic = self.standalone || self.rdzv_backend != "static";
        let unused = |flag: &str, why: &str| format!("{flag} has no effect: {why}");
        let mut remarks = Vec::new();
        if self.start_method != StartMethod::Spawn {
            remarks.push(unused("--start-method", "every rank is a program of its own"));
        }
        if self.event_log_handler != "null" {
            remarks.push(unused("--event-log-handler", "events are printed to stderr"));
        }
        let all_shown = self.redirects.is_none() && self.local_ranks_filter.is_empty() && !self.quiet_ranks;
        if let Some(rank) = self.debug_rank.filter(|_| !all_shown) {
            remarks.push(format!(
                "rank {rank} prints to its stderr how to attach, and not all ranks are shown here"
            ));
        }
        if dynamic && self.master_addr.is_some() && self.rdzv_endpoint.is_empty() {
            remarks.push(unused("--master-addr", "it is for --rdzv-backend static; try --rdzv-endpoint"));
        }
        if self.hostfile.is_some() && self.local_addr.is_some() && !self.deepspeed.no_ssh {
            remarks.push(unused("--local-addr", "each host finds its own"));
        }
        remarks.extend(self.faults_of_python());
        remarks.extend(self.deepspeed.unused().into_iter().map(|(flag, why)| unused(flag, why)));
        remarks
    }

    /// A remark about faults of steps in a Python program, which has no training loop of ours.
    fn faults_of_python(&self) -> Option<String> {
        let mut faults = self.faults.iter().flatten();
        let fault = faults.find(|fault| matches!(fault.when, When::Step(_)))?;
        self.python_program()?;
        Some(format!(
            "fault {fault} will not happen: a Python program does not report its steps; try after=30s instead of a step"
        ))
    }

    fn run_id(&self, host: &Host<'_>, step: Option<&Step>) -> String {
        match step {
            _ if self.standalone => host.fresh_id.clone(),
            Some(step) if self.rdzv_id == NO_ID => step.job.to_string(),
            _ => self.rdzv_id.clone(),
        }
    }

    fn rendezvous(&self, nodes: NodeRange, hosts: &Hosts) -> Result<Rendezvous, PlanError> {
        match self.rdzv_backend.as_str() {
            _ if self.standalone => match &hosts.fleet {
                Some(fleet) => Err(PlanError::StandaloneHosts(fleet.hosts.len())),
                None if nodes.max > 1 => Err(PlanError::StandaloneNodes(nodes)),
                None => Ok(Rendezvous::Standalone),
            },
            "static" if nodes.is_elastic() => Err(PlanError::ElasticStatic(nodes)),
            "static" => self.meet_at_node_0(nodes, hosts),
            "c10d" => {
                let (host, port) =
                    split_endpoint(&self.rdzv_endpoint, Some(C10D_PORT)).map_err(PlanError::Endpoint)?;
                let given = !self.rdzv_endpoint.trim().is_empty();
                let host = if given { host } else { hosts.first()?.unwrap_or(host) };
                let host = if host.contains(':') { format!("[{host}]") } else { host };
                Ok(Rendezvous::Dynamic { endpoint: format!("{host}:{port}"), conf: self.rdzv_conf.clone() })
            }
            backend if backend.starts_with("etcd") => Err(PlanError::Backend(backend.to_string())),
            backend => Err(PlanError::UnknownBackend(backend.to_string())),
        }
    }

    fn meet_at_node_0(&self, nodes: NodeRange, hosts: &Hosts) -> Result<Rendezvous, PlanError> {
        if !self.rdzv_endpoint.trim().is_empty() {
            let (addr, port) = split_endpoint(&self.rdzv_endpoint, None).map_err(PlanError::Endpoint)?;
            return Ok(Rendezvous::Static { addr, port });
        }
        let addr = match &self.master_addr {
            Some(given) => given.clone(),
            None => hosts.first()?.unwrap_or_else(|| MASTER_ADDR.to_string()),
        };
        // An IPv6 address may be in brackets; without them, any address can be distinguished from HOST:PORT.
        let bare = addr.trim().trim_start_matches('[').trim_end_matches(']');
        let is_host = bare.parse::<std::net::Ipv6Addr>().is_ok() || !bare.contains([':', '/', ' ']);
        if bare.is_empty() || !is_host {
            return Err(PlanError::MasterAddr(addr));
        }
        // One node alone can use any free port, so that concurrent jobs never collide.
        let port = if nodes.max == 1 { 0 } else { MASTER_PORT };
        Ok(Rendezvous::Static { addr: bare.to_string(), port: self.master_port.unwrap_or(port) })
    }

    fn program(&self, host: &Host<'_>) -> Result<(Program, Vec<OsString>), PlanError> {
        if self.module && self.no_python && !self.run_path {
            return Err(PlanError::ModuleNoPython);
        }
        let (name, args) = self.command.split_first().expect("the parser wants a program");
        let typed = Program::of_python_command(name, args).filter(|_| !self.no_python);
        if let Some((program, args)) = typed.filter(|_| !self.run_path && !self.module) {
            return Ok((program, args.to_vec()));
        }
        let name = name.clone();
        let interpreter = (host.env)(worker_env::PYTHON_EXEC).unwrap_or_else(|| "python3".into());
        let program = match () {
            () if self.run_path => Program::RunPath { interpreter, script: name },
            () if self.module => Program::PythonModule { interpreter, module: name },
            () if self.no_python || !Program::is_python_script(&name) => Program::Executable(name),
            () => Program::Python { interpreter, script: name },
        };
        Ok((program, args.to_vec()))
    }

    fn logs(&self, host: &Host<'_>) -> Result<LogPlan, PlanError> {
        if let Some(name) = &self.logs_specs {
            return Err(PlanError::LogsSpecs(name.clone()));
        }
        let duplicates = self.duplicates();
        if !duplicates.is_empty() && self.log_dir.as_deref() == Some("/dev/null".as_ref()) {
            return Err(PlanError::FiltersNowhere);
        }
        let each = self.deepspeed.enable_each_rank_log.as_ref();
        Ok(LogPlan {
            duplicates,
            dir: self.log_dir.as_ref().or(each).cloned(),
            redirects: each.map_or_else(|| self.redirects.clone(), |_| Std::Both.into()),
            tee: self.tee.clone(),
            filter: self.shown_ranks()?,
            quiet_ranks: self.quiet_ranks,
            prefix: host.text(worker_env::TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE),
            bars: Bars::default(),
        })
    }

    fn shown_ranks(&self) -> Result<Option<BTreeSet<usize>>, PlanError> {
        let list = &self.local_ranks_filter;
        let ranks: Result<BTreeSet<_>, _> = list.split(',').map(|rank| rank.trim().parse()).collect();
        match ranks {
            _ if list.is_empty() => Ok(None),
            Ok(ranks) => Ok(Some(ranks)),
            Err(_) => Err(PlanError::LocalRanksFilter(list.clone())),
        }
    }

    fn duplicates(&self) -> LineFilters {
        LineFilters {
            stdout: texts(&self.duplicate_stdout_filters),
            stderr: texts(&self.duplicate_stderr_filters),
        }
    }

    fn shutdown_timeout(&self, host: &Host<'_>) -> Result<Duration, PlanError> {
        let from_variable = || {
            let Some(value) = host.text(worker_env::TORCH_ELASTIC_SHUTDOWN_TIMEOUT) else {
                return Ok(SHUTDOWN_TIMEOUT);
            };
            parse_seconds(&value).map_err(|source| PlanError::ShutdownTimeout { value, source })
        };
        self.shutdown_timeout.map_or_else(from_variable, Ok)
    }

    fn host_timeout(&self, host: &Host<'_>) -> Result<HostTimeout, PlanError> {
        if let Some(given) = self.host_timeout {
            return Ok(given);
        }
        if let Some(meant) = self.rdzv_conf.host_timeout() {
            return HostTimeout::new(meant).map_err(|source| PlanError::KeepAlive { meant, source });
        }
        let Some(value) = host.text(worker_env::DRUMLINE_HOST_TIMEOUT) else {
            return Ok(HostTimeout::default());
        };
        value.parse().map_err(|source| PlanError::HostTimeout { value, source })
    }

    fn threads(&self) -> Result<Option<usize>, PlanError> {
        if self.omp == Some(0) { Err(PlanError::NoThreads) } else { Ok(self.omp) }
    }

    fn faults(&self, world: Option<usize>) -> Result<Vec<Fault>, PlanError> {
        let faults: Vec<Fault> = self.faults.iter().flatten().copied().collect();
        let is_strange = |fault: &&Fault| world.is_some_and(|world| fault.rank >= world);
        match (faults.iter().find(is_strange), world) {
            (Some(fault), Some(world)) => Err(PlanError::FaultRank { fault: *fault, world }),
            _ => Ok(faults),
        }
    }

    fn held_rank(&self, world: Option<usize>, host: &Host<'_>) -> Result<Option<HeldRank>, PlanError> {
        match (self.debug_rank, world) {
            (Some(rank), Some(world)) if rank >= world => Err(PlanError::DebugRank { rank, world }),
            (held, _) => Ok(held.map(|rank| HeldRank { rank, holder: host.launcher.clone() })),
        }
    }
}

/// With several nodes the launcher itself prints while ranks run, and redrawn bars would overwrite its notes.
fn bars(nodes: NodeRange) -> Bars {
    if nodes.max == 1 { Bars::Redrawn } else { Bars::Paced }
}

/// The number of ranks; `None` if the other nodes may have more or fewer than this one.
fn world(nodes: NodeRange, nproc: usize, fleet: Option<&Fleet>) -> Option<usize> {
    fleet.map(Fleet::num_ranks).or_else(|| (nodes.max == 1).then_some(nproc))
}

/// `a,b` is two texts; a double comma is a comma inside a text.
fn texts(list: &str) -> Vec<String> {
    const COMMA: &str = "\0";
    let parts = list.replace(",,", COMMA);
    let parts = parts.split(',').map(|text| text.replace(COMMA, ","));
    parts.filter(|text| !text.is_empty()).collect()
}
