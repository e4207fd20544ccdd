//! Finds a process's place in its job. Pure: the environment is a function argument.
//!
//! Four families of variables are known. The first one whose rank is set is used: torchrun's, Open MPI's, that of MPICH
//! and Intel MPI, Slurm's. (`mpirun` inside a Slurm job leaves Slurm's variables of its own daemons around, so Slurm's
//! come last. But Slurm itself sets `PMI_RANK` in some configurations, so if the two agree, Slurm's are used.)

use super::method::Method;
use super::{InitError, InitOptions};
use crate::derived_port::{derived_port, derived_ports, slurm_job, slurm_number};
use crate::node_list;
use crate::worker_env::*;
use std::time::Duration;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) rank: usize,
    pub(super) world_size: usize,
    pub(super) local_rank: usize,
    pub(super) local_world_size: Option<usize>,
    pub(super) round: u32,
    /// Host and port of the store; `None` for `file://`.
    pub(super) master: Option<Master>,
    pub(super) agent_hosts: bool,
    /// Default time limit of a call.
    pub(super) timeout: Duration,
    /// Time limit of the rendezvous.
    pub(super) time_to_meet: Duration,
}

/// The address of the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Master {
    pub(super) host: String,
    pub(super) port: u16,
    /// Where this was given: `MASTER_ADDR=n1`, `tcp://n1:29500`.
    pub(super) given: String,
    /// The job from whose number, or from torchrun's port, the port is derived; `None` if the user chose it.
    pub(super) derived_for: Option<String>,
}

impl Master {
    /// The possible addresses of the store, as `host:port`, in the order in which they are tried.
    pub(super) fn addrs(&self) -> Vec<String> {
        let at = |port: u16| match &self.host {
            host if host.contains(':') => format!("[{host}]:{port}"),
            host => format!("{host}:{port}"),
        };
        match self.derived_for {
            Some(_) => derived_ports(self.port).into_iter().map(at).collect(),
            None => vec![at(self.port)],
        }
    }
}

/// A variable and its value, for the check of both.
struct Setting {
    name: &'static str,
    value: usize,
}

impl Setting {
    fn must_be_below(&self, limit: &Setting, why: &'static str) -> Result<(), InitError> {
        if self.value < limit.value { Ok(()) } else { Err(self.contradicts(limit, why)) }
    }

    fn contradicts(&self, other: &Setting, why: &'static str) -> InitError {
        let shown = |setting: &Setting| format!("{}={}", setting.name, setting.value);
        InitError::Contradiction { left: shown(self), right: shown(other), why }
    }
}

/// A port, and the job that it is derived from.
struct Port {
    number: u16,
    derived_for: Option<String>,
}

/// What distinguishes a job from others on the same machine.
struct JobName {
    number: u64,
    name: String,
}

type Env<'a> = &'a dyn Fn(&str) -> Option<String>;

/// The variables of one family of launchers: rank, world size, local rank, local world size.
struct Family {
    rank: &'static str,
    world_size: &'static [&'static str],
    local_rank: &'static str,
    local_world_size: &'static str,
}

const TORCHRUN: Family = Family {
    rank: RANK,
    world_size: &[WORLD_SIZE],
    local_rank: LOCAL_RANK,
    local_world_size: LOCAL_WORLD_SIZE,
};
const OPEN_MPI: Family = Family {
    rank: OMPI_COMM_WORLD_RANK,
    world_size: &[OMPI_COMM_WORLD_SIZE],
    local_rank: OMPI_COMM_WORLD_LOCAL_RANK,
    local_world_size: OMPI_COMM_WORLD_LOCAL_SIZE,
};
const MPICH: Family = Family {
    rank: PMI_RANK,
    world_size: &[PMI_SIZE],
    local_rank: MPI_LOCALRANKID,
    local_world_size: MPI_LOCALNRANKS,
};
const SLURM: Family = Family {
    rank: SLURM_PROCID,
    world_size: &[SLURM_STEP_NUM_TASKS, SLURM_NTASKS],
    local_rank: SLURM_LOCALID,
    local_world_size: SLURM_STEP_TASKS_PER_NODE,
};

/// torchrun's agent has its own store on the master port; ours is on another port that all ranks can derive from it.
fn port_beside_torchrun(port: u16) -> u16 {
    derived_port(u64::from(port) * 7919)
}

impl Place {
    pub(super) fn find(env: Env<'_>, method: &Method, options: &InitOptions) -> Result<Place, InitError> {
        let family = family(env);
        let given_rank = options.rank.or(method.given().rank);
        let given_size = options.world_size.or(method.given().world_size);
        let is_alone =
            given_rank.is_none() && given_size.is_none() && *method == Method::Env && is_alone(env);
        let rank = match given_rank {
            Some(rank) => rank,
            None if is_alone => 0,
            None => whole(env, &[family.rank])?.ok_or_else(no_rank)?,
        };
        let world_size = match given_size {
            Some(size) => size,
            None if is_alone => 1,
            None => whole(env, family.world_size)?.ok_or_else(|| no_world_size(&family))?,
        };
        let local_world_size = local_world_size(env, &family)?;
        let timeout = duration(env, DRUMLINE_TIMEOUT, Duration::from_secs(300), "try 300s, 500ms or 5m")?;
        // Every socket reads this again; it is read here only to report an error early.
        duration(env, DRUMLINE_HOST_TIMEOUT, DEFAULT_HOST_TIMEOUT, "try 30s or 2m")?;
        let agent = agent(env)?;
        let mut place = Place {
            rank,
            world_size,
            local_rank: whole(env, &[family.local_rank])?.unwrap_or(rank),
            local_world_size,
            round: whole(env, &[DRUMLINE_ROUND])?.unwrap_or(0) as u32,
            master: None,
            agent_hosts: agent.is_some(),
            timeout,
            time_to_meet: options.timeout.unwrap_or(timeout),
        };
        place.check(&family)?;
        place.master = match method {
            Method::File { .. } => None,
            Method::Tcp { host, port, .. } => {
                let given = format!("tcp://{host}:{port}");
                Some(Master { host: host.clone(), port: *port, given, derived_for: None })
            }
            Method::Env => match agent {
                Some(master) => Some(master),
                None => Some(place.master_from(env, &family)?),
            },
        };
        Ok(place)
    }

    /// Whether this process hosts the store.
    pub(super) fn is_host(&self) -> bool {
        self.rank == 0 && !self.agent_hosts
    }

    fn check(&self, family: &Family) -> Result<(), InitError> {
        let world_name = family.world_size[family.world_size.len() - 1];
        let rank = Setting { name: family.rank, value: self.rank };
        let world = Setting { name: world_name, value: self.world_size };
        rank.must_be_below(&world, "ranks run from 0 to one less than that")?;
        let Some(local) = self.local_world_size else { return Ok(()) };
        let local_rank = Setting { name: family.local_rank, value: self.local_rank };
        let local_world = Setting { name: family.local_world_size, value: local };
        local_rank.must_be_below(&local_world, "they run from 0")?;
        let why = "one node cannot have more ranks than the job";
        if local <= self.world_size { Ok(()) } else { Err(local_world.contradicts(&world, why)) }
    }

    /// The master from `MASTER_ADDR` and `MASTER_PORT`, or from what is known without them.
    fn master_from(&self, env: Env<'_>, family: &Family) -> Result<Master, InitError> {
        let host = match env(MASTER_ADDR).filter(|host| !host.is_empty()) {
            Some(host) => Some((host.clone(), format!("{MASTER_ADDR}={host}"))),
            None => self.default_host(env, family)?,
        };
        let (host, given) = host.ok_or_else(no_master)?;
        let Port { number, derived_for } = self.port_from(env, family)?;
        Ok(Master { host, port: number, given, derived_for })
    }

    fn port_from(&self, env: Env<'_>, family: &Family) -> Result<Port, InitError> {
        if let Some(port) = env(MASTER_PORT) {
            let advice = "try the same free port on all ranks, e.g. MASTER_PORT=29500";
            let number = port.parse().ok().filter(|port| *port != 0);
            let number =
                number.ok_or_else(|| invalid(MASTER_PORT, &port, "a port from 1 to 65535", advice))?;
            let is_taken = env(TORCHELASTIC_USE_AGENT_STORE).is_some_and(|value| value == "True");
            if !is_taken {
                return Ok(Port { number, derived_for: None });
            }
            // Not the number of restarts: each of torchrun's agents counts its own.
            let job = format!("torchrun {number} {}", env(TORCHELASTIC_RUN_ID).unwrap_or_default());
            return Ok(Port { number: port_beside_torchrun(number), derived_for: Some(job) });
        }
        match job_name(env, family)? {
            Some(JobName { number, name }) => {
                Ok(Port { number: derived_port(number), derived_for: Some(name) })
            }
            // A single process: any port will do, no other process needs it.
            None if self.world_size == 1 && !self.agent_hosts => Ok(Port { number: 0, derived_for: None }),
            None => Err(InitError::Missing {
                variable: MASTER_PORT,
                advice: "try the same free port on all ranks, e.g. MASTER_PORT=29500".into(),
            }),
        }
    }

    /// The default host, and where it comes from. One node: loopback. Slurm: the first node of the step.
    fn default_host(&self, env: Env<'_>, family: &Family) -> Result<Option<(String, String)>, InitError> {
        let loopback = || Ok(Some((String::from("127.0.0.1"), String::from("one node"))));
        if self.agent_hosts || family.rank == RANK && self.world_size > 1 {
            return Ok(None);
        }
        if self.world_size == 1 || self.local_world_size == Some(self.world_size) {
            return loopback();
        }
        let names = [SLURM_STEP_NODELIST, SLURM_JOB_NODELIST, SLURM_NODELIST];
        let Some((variable, list)) = names.iter().find_map(|name| Some((*name, env(name)?))) else {
            return Ok(None);
        };
        let nodes = node_list::expand(&list).map_err(|source| InitError::NodeList { variable, source })?;
        if nodes.len() == 1 {
            return loopback();
        }
        Ok(nodes.into_iter().next().map(|node| (node, format!("{variable}={list}"))))
    }
}

fn family(env: Env<'_>) -> Family {
    let has = |name: &str| env(name).is_some();
    let slurm_agrees = env(SLURM_PROCID) == env(PMI_RANK) && env(SLURM_NTASKS) == env(PMI_SIZE);
    if has(RANK) {
        TORCHRUN
    } else if has(OMPI_COMM_WORLD_RANK) {
        OPEN_MPI
    } else if has(PMI_RANK) && !slurm_agrees {
        MPICH
    } else if has(SLURM_PROCID) {
        SLURM
    } else {
        TORCHRUN
    }
}

/// Whether no variable indicates other processes: no rank, no world size except 1, no address. Such a process is a job
/// by itself, as with `cargo run`.
fn is_alone(env: Env<'_>) -> bool {
    let families = [TORCHRUN, OPEN_MPI, MPICH, SLURM];
    let has_rank = families.iter().any(|family| env(family.rank).is_some());
    let mut sizes = families.iter().flat_map(|family| family.world_size).filter_map(|name| env(name));
    let has_others = sizes.any(|size| size.trim() != "1");
    let has_meeting = [MASTER_ADDR, MASTER_PORT, DRUMLINE_STORE].iter().any(|name| env(name).is_some());
    !(has_rank || has_others || has_meeting)
}

fn local_world_size(env: Env<'_>, family: &Family) -> Result<Option<usize>, InitError> {
    if family.rank != SLURM_PROCID {
        return whole(env, &[family.local_world_size]);
    }
    let node = whole(env, &[SLURM_NODEID])?;
    let list = env(SLURM_STEP_TASKS_PER_NODE).or_else(|| env(SLURM_TASKS_PER_NODE));
    Ok(node.zip(list).and_then(|(node, list)| node_list::tasks_on_node(&list, node)))
}

/// A number that is the same on all ranks of the job and, most likely, different for other jobs of the machine; and a
/// name that is unique to the job.
fn job_name(env: Env<'_>, family: &Family) -> Result<Option<JobName>, InitError> {
    if family.rank == SLURM_PROCID {
        let job = whole(env, &[SLURM_JOB_ID])?;
        let step = whole(env, &[SLURM_STEP_ID])?.unwrap_or(0);
        return Ok(job.map(|job| JobName {
            number: slurm_number(job as u64, step as u64),
            name: slurm_job(&format!("{job}.{step}")),
        }));
    }
    let name = if family.rank == OMPI_COMM_WORLD_RANK { env(PMIX_NAMESPACE) } else { None };
    let number =
        |name: &str| name.bytes().fold(0u64, |sum, byte| sum.wrapping_mul(131).wrapping_add(byte.into()));
    Ok(name.map(|name| JobName { number: number(&name), name: format!("mpi {name}") }))
}

/// The first of the variables that is set, as an integer.
fn whole(env: Env<'_>, names: &[&'static str]) -> Result<Option<usize>, InitError> {
    let Some((name, value)) = names.iter().find_map(|name| Some((*name, env(name)?))) else {
        return Ok(None);
    };
    match value.trim().parse::<u32>() {
        Ok(number) => Ok(Some(number as usize)),
        Err(_) => Err(invalid(name, &value, "an integer", "try correcting it, or leaving it to a launcher")),
    }
}

/// The address of the store that a launcher hosts, if one does.
fn agent(env: Env<'_>) -> Result<Option<Master>, InitError> {
    let Some(text) = env(DRUMLINE_STORE).filter(|text| !text.is_empty()) else { return Ok(None) };
    let split = text.rsplit_once(':').filter(|(host, _)| !host.is_empty());
    let split = split.and_then(|(host, port)| Some((host, port.parse().ok().filter(|port| *port != 0)?)));
    let advice = "try unsetting it, then rank 0 hosts the store";
    let (host, port) = split.ok_or_else(|| invalid(DRUMLINE_STORE, &text, "`host:port`", advice))?;
    let host = host.trim_start_matches('[').trim_end_matches(']').to_string();
    Ok(Some(Master { host, port, given: format!("{DRUMLINE_STORE}={text}"), derived_for: None }))
}

fn duration(
    env: Env<'_>,
    variable: &'static str,
    default: Duration,
    advice: &'static str,
) -> Result<Duration, InitError> {
    let Some(text) = env(variable) else { return Ok(default) };
    let duration = parse_duration(&text).filter(|duration| !duration.is_zero());
    duration.ok_or_else(|| invalid(variable, &text, "a duration", advice))
}

fn invalid(variable: &str, value: &str, expected: &'static str, advice: &'static str) -> InitError {
    let variable = variable.into();
    if value.trim().is_empty() {
        return InitError::Empty { variable, expected, advice };
    }
    InitError::Invalid { variable, value: value.into(), expected, advice }
}

fn no_rank() -> InitError {
    let advice = format!(
        "nor are {OMPI_COMM_WORLD_RANK}, {PMI_RANK}, {SLURM_PROCID}; try srun or mpirun, or {RANK}=0 {WORLD_SIZE}=1 for a single process"
    );
    InitError::Missing { variable: RANK, advice }
}

fn no_world_size(family: &Family) -> InitError {
    let advice = format!("{} is, so the number of ranks is required too; try setting it", family.rank);
    InitError::Missing { variable: family.world_size[family.world_size.len() - 1], advice }
}

pub(super) fn no_master() -> InitError {
    let advice =
        "try the address of the host of rank 0 on all ranks, e.g. MASTER_ADDR=127.0.0.1 on one machine";
    InitError::Missing { variable: MASTER_ADDR, advice: advice.into() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    fn find(variables: &str, method: &str, options: &InitOptions) -> Result<Place, InitError> {
        let map: HashMap<&str, &str> =
            variables.split_whitespace().map(|pair| pair.split_once('=').unwrap()).collect();
        Place::find(
            &|name| map.get(name).map(|value| (*value).into()),
            &Method::parse(method).unwrap(),
            options,
        )
    }

    fn env(variables: &str) -> Place {
        find(variables, "env://", &InitOptions::default()).unwrap()
    }

    fn error(variables: &str) -> String {
        find(variables, "env://", &InitOptions::default()).unwrap_err().to_string()
    }

    fn shown(place: &Place) -> String {
        let Place { rank, world_size, local_rank, .. } = place;
        let Master { host, port, .. } = place.master.as_ref().unwrap();
        format!("{rank}/{world_size} local {local_rank}/{:?} {host}:{port}", place.local_world_size)
    }

    const TORCH: &str =
        "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=n1 MASTER_PORT=29500";

    #[test]
    fn torchrun() {
        let place = env(&format!("{TORCH} DRUMLINE_ROUND=2 DRUMLINE_TIMEOUT=5s"));
        assert_eq!(shown(&place), "3/4 local 1/Some(2) n1:29500");
        assert_eq!((place.round, place.agent_hosts, place.timeout), (2, false, Duration::from_secs(5)));
        let place = env(&format!("{TORCH} DRUMLINE_STORE=[fe80::7]:31"));
        assert_eq!(shown(&place), "3/4 local 1/Some(2) fe80::7:31", "not the master port");
        assert!(place.agent_hosts);
        let place = env(&format!("{TORCH} TORCHELASTIC_USE_AGENT_STORE=True"));
        assert_eq!(
            shown(&place),
            "3/4 local 1/Some(2) n1:15500",
            "torchrun itself listens on the master port"
        );
        let place = env(&format!("{TORCH} TORCHELASTIC_USE_AGENT_STORE=False"));
        assert_eq!(shown(&place), "3/4 local 1/Some(2) n1:29500");
        assert_eq!(shown(&env("RANK=0 WORLD_SIZE=1")), "0/1 local 0/None 127.0.0.1:0");
        assert!(env("RANK=0 WORLD_SIZE=1").is_host());
    }

    #[test]
    fn a_process_without_a_launcher_is_a_job_by_itself() {
        for variables in ["", "SLURM_NTASKS=1 SLURM_JOB_ID=7", "WORLD_SIZE=1", "DRUMLINE_TIMEOUT=5s"] {
            let place = env(variables);
            assert_eq!(shown(&place), "0/1 local 0/None 127.0.0.1:0", "{variables}");
            assert!(place.is_host());
        }
    }

    #[test]
    fn slurm() {
        let step = "SLURM_PROCID=5 SLURM_NTASKS=8 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_JOB_ID=16003";
        let place = env(&format!("{step} SLURM_JOB_NODELIST=gpu[07-08] SLURM_TASKS_PER_NODE=4(x2)"));
        assert_eq!(shown(&place), "5/8 local 1/Some(4) gpu07:16003");
        let place = env(&format!("{step} SLURM_NODELIST=n[2-3] MASTER_PORT=1234"));
        assert_eq!(shown(&place), "5/8 local 1/None n2:1234");
        let place = env(&format!("{step} SLURM_NODELIST=n[2-3] SLURM_STEP_NODELIST=n3 SLURM_STEP_ID=4"));
        assert_eq!(shown(&place), "5/8 local 1/None 127.0.0.1:23087", "one node: loopback");
        let place = env(&format!("{step} SLURM_NODELIST=n[2-3] PMI_RANK=5 PMI_SIZE=8"));
        assert_eq!(shown(&place), "5/8 local 1/None n2:16003", "srun --mpi=pmi2");
    }

    #[test]
    fn mpi() {
        let open = "OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=0";
        let place =
            env(&format!("{open} OMPI_COMM_WORLD_LOCAL_SIZE=2 MASTER_ADDR=n1 MASTER_PORT=9 SLURM_PROCID=7"));
        assert_eq!(shown(&place), "2/4 local 0/Some(2) n1:9");
        let alone = env(&format!("{open} OMPI_COMM_WORLD_LOCAL_SIZE=4 PMIX_NAMESPACE=prterun-n1-77@1"));
        let Master { host, port, .. } = alone.master.unwrap();
        assert!(host == "127.0.0.1" && (15_000..30_000).contains(&port));
        let place = env("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2 MASTER_PORT=9");
        assert_eq!(shown(&place), "1/2 local 1/Some(2) 127.0.0.1:9");
    }

    #[test]
    fn the_origin_of_the_host_is_known() {
        let given = |place: Place| place.master.unwrap().given;
        assert_eq!(given(env(TORCH)), "MASTER_ADDR=n1");
        let slurm = "SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_NODELIST=n[2-3] SLURM_JOB_ID=1";
        assert_eq!(given(env(slurm)), "SLURM_NODELIST=n[2-3]");
        assert_eq!(given(find(TORCH, "tcp://h:7", &InitOptions::default()).unwrap()), "tcp://h:7");
    }

    #[test]
    fn the_rendezvous_timeout_is_the_option_or_else_the_variable() {
        let meet = |variables: &str, timeout| {
            let options = InitOptions { timeout, ..InitOptions::default() };
            find(variables, "env://", &options).unwrap().time_to_meet.as_secs()
        };
        let (alone, given) = ("RANK=0 WORLD_SIZE=1", Some(Duration::from_secs(7)));
        assert_eq!(meet(alone, None), 300);
        assert_eq!(meet(&format!("{alone} DRUMLINE_TIMEOUT=5s"), None), 5);
        assert_eq!(meet(&format!("{alone} DRUMLINE_TIMEOUT=5s"), given), 7);
    }

    #[test]
    fn options_and_url_override_variables() {
        let options = InitOptions { rank: Some(1), world_size: Some(2), ..Default::default() };
        assert_eq!(shown(&find("", "tcp://h:7", &options).unwrap()), "1/2 local 1/None h:7");
        let place = find(TORCH, "tcp://h:7?rank=0&world_size=9", &InitOptions::default()).unwrap();
        assert_eq!(shown(&place), "0/9 local 1/Some(2) h:7");
    }

    #[test]
    fn errors_name_the_variable_its_value_and_what_to_try() {
        let cases = [
            ("MASTER_ADDR=h MASTER_PORT=29500", "RANK is not set; nor are OMPI"),
            ("WORLD_SIZE=2", "RANK is not set; nor are OMPI"),
            ("SLURM_NTASKS=8", "RANK is not set; nor are OMPI"),
            ("RANK=0", "WORLD_SIZE is not set; RANK is"),
            ("SLURM_PROCID=0", "SLURM_NTASKS is not set; SLURM_PROCID is"),
            ("RANK=x WORLD_SIZE=2", "RANK=x is not an integer; try"),
            ("RANK= WORLD_SIZE=2", "RANK is empty, expected an integer; try"),
            ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=", "MASTER_PORT is empty, expected a port"),
            ("RANK=-1 WORLD_SIZE=2", "RANK=-1 is not an integer; try"),
            ("RANK=2 WORLD_SIZE=2", "RANK=2 and WORLD_SIZE=2 contradict each other: ranks run from 0"),
            ("RANK=0 WORLD_SIZE=0", "RANK=0 and WORLD_SIZE=0 contradict"),
            ("RANK=0 WORLD_SIZE=2", "MASTER_ADDR is not set; try"),
            ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=h", "MASTER_PORT is not set; try"),
            ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=99999", "MASTER_PORT=99999 is not a port"),
            ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=0", "MASTER_PORT=0 is not a port"),
            (
                "RANK=0 WORLD_SIZE=4 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2",
                "LOCAL_RANK=2 and LOCAL_WORLD_SIZE=2 contradict",
            ),
            ("RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=4", "LOCAL_WORLD_SIZE=4 and WORLD_SIZE=2 contradict"),
            ("RANK=0 WORLD_SIZE=1 DRUMLINE_STORE=x", "DRUMLINE_STORE=x is not `host:port`; try"),
            ("RANK=0 WORLD_SIZE=1 DRUMLINE_STORE=x:0", "DRUMLINE_STORE=x:0 is not `host:port`"),
            (
                "RANK=0 WORLD_SIZE=1 DRUMLINE_TIMEOUT=soon",
                "DRUMLINE_TIMEOUT=soon is not a duration; try 300s",
            ),
            (
                "RANK=0 WORLD_SIZE=1 DRUMLINE_HOST_TIMEOUT=0s",
                "DRUMLINE_HOST_TIMEOUT=0s is not a duration; try 30s",
            ),
            (
                "SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_NODELIST=n[1-",
                "SLURM_NODELIST: node list \"n[1-\": a `[` is not",
            ),
            (
                "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=1",
                "MASTER_ADDR is not set",
            ),
        ];
        for (variables, part) in cases {
            let error = error(variables);
            assert!(error.contains(part), "{variables}: {error}");
        }
    }
}
