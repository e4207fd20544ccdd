//! The nodes as DeepSpeed's flags give them: a hostfile, filters, and the first N of them.
//!
//! ```text
//!   hostfile, or this node and its GPUs ─▶ --include | --exclude ─▶ --num-nodes ─▶ --num-gpus ─▶ Hosts
//! ```

use drumline_launch::{Fleet, HostSlots, NodeRange, exclude_slots, include_slots, parse_hostfile};

use super::args::RunArgs;
use super::deepspeed::starter;
use super::error::PlanError;
use super::host::Host;

/// What those flags mean for the plan; all `None` without them.
#[derive(Default)]
pub(super) struct Hosts {
    pub(super) nodes: Option<NodeRange>,
    pub(super) node_rank: Option<usize>,
    pub(super) nproc: Option<usize>,
    pub(super) devices: Option<Vec<String>>,
    pub(super) fleet: Option<Fleet>,
    /// The host of node 0.
    first: Option<String>,
    only_loopback: bool,
}

impl Hosts {
    pub(super) fn chosen(args: &RunArgs, host: &Host<'_>) -> Result<Self, PlanError> {
        args.deepspeed.refused()?;
        let filtered = args.include.is_some() || args.exclude.is_some();
        if host.hostfile.is_none() && !filtered {
            return Self::without_list(args, host);
        }
        if args.nnodes.is_some() {
            return Err(PlanError::NodesTwice);
        }
        let hosts = first_hosts(filter(pool(args, host)?, args)?, count("--num-nodes", args.num_nodes)?)?;
        let hosts = first_slots(hosts, count("--num-gpus", args.num_gpus)?)?;
        let by_hand = args.node_rank.filter(|_| args.deepspeed.no_ssh);
        if args.deepspeed.no_ssh && by_hand.is_none_or(|rank| rank >= hosts.len()) {
            return Err(
                by_hand.map_or(PlanError::NoSshRank, |rank| PlanError::NodeRank { rank, nodes: hosts.len() })
            );
        }
        let node_rank = by_hand.or_else(|| hosts.iter().position(|other| host.is_called(&other.name)));
        let given = args.nproc_per_node.map(|nproc| nproc.on(host)).transpose()?;
        let slots = hosts[node_rank.unwrap_or(0)].slots.len();
        let alone =
            by_hand.is_some() || (hosts.len() == 1 && node_rank.is_some() && !args.deepspeed.force_multi);
        Ok(Self {
            nodes: Some(NodeRange::exactly(hosts.len())),
            node_rank,
            nproc: Some(given.unwrap_or(slots)),
            devices: node_rank.map(|rank| devices(&hosts[rank], host)),
            first: Some(hosts[0].name.clone()),
            only_loopback: hosts.iter().all(|host| is_loopback(&host.name)),
            fleet: if alone { None } else { Some(fleet(hosts, given, args)?) },
        })
    }

    fn without_list(args: &RunArgs, host: &Host<'_>) -> Result<Self, PlanError> {
        if args.launcher.is_some() || args.deepspeed.force_multi {
            return Err(PlanError::NoHosts);
        }
        let nodes = count("--num-nodes", args.num_nodes)?.map(NodeRange::exactly);
        let gpus = host.gpus();
        let asked = match (args.num_gpus, count("--num-gpus", args.num_gpus)?) {
            (None, _) => return Ok(Self { nodes, ..Self::default() }),
            (_, None) if gpus.is_empty() => return Err(no_gpu(host, "--num-gpus", "")),
            (_, all_or_some) => all_or_some.unwrap_or(gpus.len()),
        };
        let devices = gpus.get(..asked).ok_or(PlanError::FewGpus { asked, found: gpus.len() })?;
        Ok(Self { nodes, nproc: Some(asked), devices: Some(devices.to_vec()), ..Self::default() })
    }

    /// The host of node 0, as the others reach it.
    pub(super) fn first(&self) -> Result<Option<String>, PlanError> {
        let several = self.nodes.is_some_and(|nodes| nodes.max > 1);
        let Some(name) = self.first.as_ref().filter(|_| several) else { return Ok(None) };
        // The name may begin with a user, for ssh.
        let first = name.rsplit('@').next().unwrap_or(name).to_string();
        if is_loopback(&first) && !self.only_loopback {
            return Err(PlanError::FirstIsLoopback { first });
        }
        Ok(Some(first))
    }
}

fn is_loopback(name: &str) -> bool {
    name == "localhost" || name.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

fn fleet(hosts: Vec<HostSlots>, nproc: Option<usize>, args: &RunArgs) -> Result<Fleet, PlanError> {
    let starter = starter(args.launcher)?;
    let starter_args = args.deepspeed.starter_args(starter);
    Ok(Fleet { hosts, nproc, starter, ssh_port: args.deepspeed.ssh_port, starter_args })
}

/// A negative number means "all" in DeepSpeed.
fn count(flag: &'static str, given: Option<i64>) -> Result<Option<usize>, PlanError> {
    match given {
        Some(0) => Err(PlanError::Zero { flag, given: 0 }),
        given => Ok(given.and_then(|number| usize::try_from(number).ok())),
    }
}

fn no_gpu(host: &Host<'_>, flag: &'static str, more: &'static str) -> PlanError {
    PlanError::NoGpuToChoose { flag, why: host.why_no_gpu(), more }
}

fn pool(args: &RunArgs, host: &Host<'_>) -> Result<Vec<HostSlots>, PlanError> {
    if let Some(text) = &host.hostfile {
        return parse_hostfile(text).map_err(PlanError::Hosts);
    }
    let flag = if args.include.is_some() { "--include" } else { "--exclude" };
    match host.gpus().len() {
        0 => Err(no_gpu(host, flag, ", or --hostfile FILE for other hosts")),
        gpus => Ok(vec![HostSlots { name: "localhost".to_string(), slots: (0..gpus).collect() }]),
    }
}

fn filter(hosts: Vec<HostSlots>, args: &RunArgs) -> Result<Vec<HostSlots>, PlanError> {
    match (&args.include, &args.exclude) {
        (Some(filter), _) => include_slots(&hosts, filter).map_err(PlanError::Hosts),
        (None, Some(filter)) => exclude_slots(&hosts, filter).map_err(PlanError::Hosts),
        (None, None) => Ok(hosts),
    }
}

fn first_hosts(mut hosts: Vec<HostSlots>, asked: Option<usize>) -> Result<Vec<HostSlots>, PlanError> {
    let found = hosts.len();
    match asked {
        Some(asked) if asked > found => Err(PlanError::FewHosts { asked, found }),
        asked => {
            hosts.truncate(asked.unwrap_or(found));
            Ok(hosts)
        }
    }
}

fn first_slots(mut hosts: Vec<HostSlots>, asked: Option<usize>) -> Result<Vec<HostSlots>, PlanError> {
    let Some(asked) = asked else { return Ok(hosts) };
    if let Some(poor) = hosts.iter().find(|host| host.slots.len() < asked) {
        return Err(PlanError::FewSlots { host: poor.name.clone(), slots: poor.slots.len(), asked });
    }
    hosts.iter_mut().for_each(|host| host.slots.truncate(asked));
    Ok(hosts)
}

/// This node's slots as `CUDA_VISIBLE_DEVICES` names them: slot 1 of a launcher that sees GPUs 4 and 6 is GPU 6.
fn devices(this: &HostSlots, host: &Host<'_>) -> Vec<String> {
    let gpus = host.gpus();
    let device = |slot: &usize| gpus.get(*slot).cloned().unwrap_or_else(|| slot.to_string());
    this.slots.iter().map(device).collect()
}
