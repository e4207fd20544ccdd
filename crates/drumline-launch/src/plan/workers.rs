//! The command and the environment of each worker of a plan.

use std::ffi::OsString;

use drumline_rendezvous::fault::{Fault, Restarts, When};
use drumline_rendezvous::worker_env as names;

use crate::environment::{Environment, Place, chosen_threads, terminal};
use crate::plan::LaunchPlan;

impl LaunchPlan {
    /// A worker's place among `num_nodes` nodes if this is node `node_rank`.
    pub fn place(&self, local_rank: usize, node_rank: usize, num_nodes: usize) -> Place {
        let local_world_size = self.nproc;
        let rank = node_rank * local_world_size + local_rank;
        let world_size = num_nodes * local_world_size;
        Place { rank, world_size, local_rank, local_world_size, node_rank, num_nodes }
    }

    /// The program that the worker at `place` executes, and all its arguments.
    pub fn command(&self, place: &Place) -> (OsString, Vec<OsString>) {
        let (program, mut args) = self.program.command();
        args.extend(self.local_rank_arg.map(|spelling| spelling.of(self.visible_local_rank(place))));
        args.extend(self.args.iter().cloned());
        match self.debug_rank.as_ref().filter(|held| held.rank == place.rank) {
            None => (program, args),
            Some(held) => {
                let before = ["hold".into(), "--".into(), program];
                (held.holder.clone(), before.into_iter().chain(args).collect())
            }
        }
    }

    /// What the plan adds to the environment of the worker at `place`. `visible` is the launcher's own
    /// `CUDA_VISIBLE_DEVICES`.
    pub fn environment(&self, place: &Place, visible: Option<&str>) -> Environment {
        let mut env = vec![
            (names::ROLE_NAME, self.role.clone()),
            (names::TORCHELASTIC_MAX_RESTARTS, self.max_restarts.to_string()),
            (names::TORCHELASTIC_RUN_ID, self.run_id.clone()),
            (names::LOCAL_RANK, self.visible_local_rank(place).to_string()),
            (names::DRUMLINE_HOST_TIMEOUT, format!("{}s", self.contact.host_timeout.as_secs_f64())),
        ];
        env.extend(self.step_faults().map(|faults| (names::DRUMLINE_FAULTS, faults)));
        env.extend(self.omp.map(|threads| (names::OMP_NUM_THREADS, threads.to_string())));
        env.extend(self.devices_of(place, visible).map(|devices| (names::CUDA_VISIBLE_DEVICES, devices)));
        let env = env.into_iter().map(|(name, value)| (name.into(), Some(value.into())));
        let terminal = terminal().filter(|_| place.num_nodes == 1);
        env.chain(terminal.map(|path| (names::DRUMLINE_TERMINAL.into(), Some(path.into())))).collect()
    }

    /// The faults that the ranks inject themselves, as the text of their variable.
    fn step_faults(&self) -> Option<String> {
        let faults = self.faults.iter().filter(|fault| matches!(fault.when, When::Step(_)));
        let faults: Vec<_> = faults.map(Fault::to_string).collect();
        (!faults.is_empty()).then(|| faults.join(";"))
    }

    /// The faults that the launcher injects after `restarts` restarts.
    pub(crate) fn timed_faults(&self, restarts: usize) -> Vec<Fault> {
        let is_due =
            |fault: &Fault| matches!(fault.when, When::After(_)) && fault.restarts.includes(restarts);
        self.faults.iter().copied().filter(is_due).collect()
    }

    /// The faults that need more restarts than `restarts`.
    pub(crate) fn faults_after(&self, restarts: usize) -> impl Iterator<Item = &Fault> {
        let is_later =
            move |fault: &&Fault| matches!(fault.restarts, Restarts::Exactly(number) if number > restarts);
        self.faults.iter().filter(is_later)
    }

    /// `OMP_NUM_THREADS` of each worker, if the launcher chooses it.
    pub fn chosen_threads(&self) -> Option<usize> {
        chosen_threads(self.nproc).filter(|_| self.omp.is_none())
    }

    /// The local rank that the worker gets, which is always 0 if it sees one GPU only.
    fn visible_local_rank(&self, place: &Place) -> usize {
        if self.virtual_local_rank { 0 } else { place.local_rank }
    }

    /// The GPUs that the worker should see, if not all that the launcher sees.
    fn devices_of(&self, place: &Place, visible: Option<&str>) -> Option<String> {
        let chosen = self.devices.as_ref().map(|devices| devices.join(","));
        if !self.virtual_local_rank {
            return chosen;
        }
        let all = chosen.or_else(|| visible.map(str::to_string));
        let nth =
            |list: String| list.split(',').nth(place.local_rank).map(|device| device.trim().to_string());
        Some(all.and_then(nth).unwrap_or_else(|| place.local_rank.to_string()))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::{HeldRank, LocalRankArg, NodeRange, Program};

    pub(crate) fn plan() -> LaunchPlan {
        LaunchPlan {
            nodes: NodeRange::exactly(2),
            node_rank: 1,
            nproc: 2,
            role: "trainer".to_string(),
            run_id: "job".to_string(),
            max_restarts: 3,
            args: vec!["-x".into()],
            ..LaunchPlan::new(Program::Executable("./a".into()))
        }
    }

    fn value(plan: &LaunchPlan, local_rank: usize, name: &str, visible: Option<&str>) -> Option<OsString> {
        let env = plan.environment(&plan.place(local_rank, 1, 2), visible);
        env.into_iter().find(|(other, _)| other == name).and_then(|(_, value)| value)
    }

    #[test]
    fn ranks_follow_nodes_and_arguments_follow_the_local_rank() {
        let plain = plan();
        let place = plain.place(1, 1, 2);
        assert_eq!((place.rank, place.world_size, place.local_world_size), (3, 4, 2));
        assert_eq!(plain.command(&place), ("./a".into(), vec!["-x".into()]));
        for (spelling, arg) in
            [(LocalRankArg::Dash, "--local-rank=1"), (LocalRankArg::Underscore, "--local_rank=1")]
        {
            let plan = LaunchPlan { local_rank_arg: Some(spelling), ..plan() };
            assert_eq!(plan.command(&place).1, [arg, "-x"]);
        }
    }

    #[test]
    fn only_the_held_rank_is_started_by_the_holder() {
        let held = HeldRank { rank: 3, holder: "/bin/drumline".into() };
        let plan = LaunchPlan { debug_rank: Some(held), local_rank_arg: Some(LocalRankArg::Dash), ..plan() };
        assert_eq!(plan.command(&plan.place(0, 1, 2)).0, "./a");
        let (program, args) = plan.command(&plan.place(1, 1, 2));
        assert_eq!(program, "/bin/drumline");
        assert_eq!(args, ["hold", "--", "./a", "--local-rank=1", "-x"]);
    }

    #[test]
    fn the_plan_sets_environment_variables() {
        let is = |plan: &LaunchPlan, name, visible| value(plan, 1, name, visible);
        assert_eq!(is(&plan(), "ROLE_NAME", None), Some("trainer".into()));
        assert_eq!(is(&plan(), "TORCHELASTIC_RUN_ID", None), Some("job".into()));
        assert_eq!(is(&plan(), "OMP_NUM_THREADS", None), None);
        assert_eq!(is(&LaunchPlan { omp: Some(5), ..plan() }, "OMP_NUM_THREADS", None), Some("5".into()));
        assert_eq!(is(&plan(), "CUDA_VISIBLE_DEVICES", Some("4,6")), None);
    }

    #[test]
    fn a_virtual_local_rank_sees_one_gpu() {
        let narrow = LaunchPlan { virtual_local_rank: true, ..plan() };
        let gpu = |plan: &LaunchPlan, visible| value(plan, 1, "CUDA_VISIBLE_DEVICES", visible);
        assert_eq!(value(&narrow, 1, "LOCAL_RANK", None), Some("0".into()));
        assert_eq!(gpu(&narrow, None), Some("1".into()));
        assert_eq!(gpu(&narrow, Some("4,6")), Some("6".into()));
        let chosen = LaunchPlan { devices: Some(vec!["7".into(), "5".into()]), ..narrow };
        assert_eq!(gpu(&chosen, Some("4,6")), Some("5".into()));
        let whole = LaunchPlan { virtual_local_rank: false, ..chosen };
        assert_eq!(gpu(&whole, Some("4,6")), Some("7,5".into()));
        assert_eq!(value(&whole, 1, "LOCAL_RANK", None), Some("1".into()));
    }
}
