//! The nodes as DeepSpeed's flags give them: a hostfile, filters, and the first so many of them.
//!
//! ```text
//!   hostfile, or this node and its GPUs ─▶ --include | --exclude ─▶ --num-nodes ─▶ --num-gpus ─▶ Hosts
//! ```

use drumline_launch::{Fleet, HostSlots, NodeRange, Starter, exclude_slots, include_slots, parse_hostfile};

use super::args::RunArgs;
use super::error::PlanError;
use super::host::Host;

/// What those flags say about the plan; all `None` without them.
#[derive(Default)]
pub(super) struct Hosts {
    pub(super) nodes: Option<NodeRange>,
    pub(super) node_rank: Option<usize>,
    pub(super) nproc: Option<usize>,
    pub(super) devices: Option<Vec<String>>,
    pub(super) fleet: Option<Fleet>,
}

impl Hosts {
    pub(super) fn chosen(args: &RunArgs, host: &Host<'_>) -> Result<Self, PlanError> {
        let filtered = args.include.is_some() || args.exclude.is_some();
        if host.hostfile.is_none() && !filtered {
            return Self::without_list(args, host);
        }
        if args.nnodes.is_some() {
            return Err(PlanError::NodesTwice);
        }
        let hosts = first_hosts(filter(pool(host)?, args)?, count("--num-nodes", args.num_nodes)?)?;
        let hosts = first_slots(hosts, count("--num-gpus", args.num_gpus)?)?;
        let slots = even(&hosts)?;
        let node_rank = hosts.iter().position(|other| host.is_called(&other.name));
        let devices = node_rank.map(|rank| devices(&hosts[rank], host));
        let nproc = Some(args.nproc_per_node.map_or(Ok(slots), |nproc| nproc.on(host))?);
        let nodes = Some(NodeRange::exactly(hosts.len()));
        let alone = hosts.len() == 1 && node_rank.is_some();
        let starter = args.launcher.map_or(Starter::Ssh, Into::into);
        let fleet = (!alone).then_some(Fleet { hosts, starter });
        Ok(Self { nodes, node_rank, nproc, devices, fleet })
    }

    fn without_list(args: &RunArgs, host: &Host<'_>) -> Result<Self, PlanError> {
        if args.launcher.is_some() {
            return Err(PlanError::NoHosts);
        }
        let nodes = count("--num-nodes", args.num_nodes)?.map(NodeRange::exactly);
        let gpus = host.gpus();
        let asked = match (args.num_gpus, count("--num-gpus", args.num_gpus)?) {
            (None, _) => return Ok(Self { nodes, ..Self::default() }),
            (_, None) if gpus.is_empty() => return Err(PlanError::NoGpu(host.why_no_gpu())),
            (_, all_or_some) => all_or_some.unwrap_or(gpus.len()),
        };
        let devices = gpus.get(..asked).ok_or(PlanError::FewGpus { asked, found: gpus.len() })?;
        Ok(Self { nodes, nproc: Some(asked), devices: Some(devices.to_vec()), ..Self::default() })
    }

    /// The host of node 0, if other hosts take part.
    pub(super) fn first(&self) -> Option<String> {
        self.fleet.as_ref().map(|fleet| fleet.hosts[0].name.clone())
    }
}

/// A negative number is DeepSpeed's way to say "all".
fn count(flag: &'static str, given: Option<i64>) -> Result<Option<usize>, PlanError> {
    match given {
        Some(0) => Err(PlanError::Zero { flag, given: 0 }),
        given => Ok(given.and_then(|number| usize::try_from(number).ok())),
    }
}

fn pool(host: &Host<'_>) -> Result<Vec<HostSlots>, PlanError> {
    if let Some(text) = &host.hostfile {
        return parse_hostfile(text).map_err(PlanError::Hosts);
    }
    match host.gpus().len() {
        0 => Err(PlanError::NoGpu(host.why_no_gpu())),
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

/// The number of slots that all hosts have.
fn even(hosts: &[HostSlots]) -> Result<usize, PlanError> {
    let (first, of_first) = (hosts[0].name.clone(), hosts[0].slots.len());
    match hosts.iter().find(|host| host.slots.len() != of_first) {
        Some(other) => {
            Err(PlanError::Uneven { host: other.name.clone(), slots: other.slots.len(), first, of_first })
        }
        None => Ok(of_first),
    }
}

/// This node's slots in the words of `CUDA_VISIBLE_DEVICES`: slot 1 of a launcher that sees GPUs 4 and 6 is GPU 6.
fn devices(this: &HostSlots, host: &Host<'_>) -> Vec<String> {
    let gpus = host.gpus();
    let device = |slot: &usize| gpus.get(*slot).cloned().unwrap_or_else(|| slot.to_string());
    this.slots.iter().map(device).collect()
}
