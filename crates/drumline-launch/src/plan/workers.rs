//! The command and the environment of each worker of a plan.

use std::ffi::OsString;

use drumline_rendezvous::worker_env as names;

use crate::environment::{Environment, Place};
use crate::plan::LaunchPlan;

impl LaunchPlan {
    /// Where a worker stands among `num_nodes` nodes if this is node `node_rank`.
    pub fn place(&self, local_rank: usize, node_rank: usize, num_nodes: usize) -> Place {
        let local_world_size = self.nproc;
        let rank = node_rank * local_world_size + local_rank;
        let world_size = num_nodes * local_world_size;
        Place { rank, world_size, local_rank, local_world_size, node_rank, num_nodes }
    }

    /// The program that the worker at `place` executes, and all its arguments.
    pub fn command(&self, place: &Place) -> (OsString, Vec<OsString>) {
        let (program, mut args) = self.program.command();
        args.extend(self.local_rank_arg.map(|spelling| spelling.of(self.told_local_rank(place))));
        args.extend(self.args.iter().cloned());
        (program, args)
    }

    /// What the plan adds to the environment that any worker at `place` gets. `visible` is what
    /// `CUDA_VISIBLE_DEVICES` says to the launcher itself.
    pub fn environment(&self, place: &Place, visible: Option<&str>) -> Environment {
        let mut env = vec![
            (names::ROLE_NAME, self.role.clone()),
            (names::TORCHELASTIC_MAX_RESTARTS, self.max_restarts.to_string()),
            (names::TORCHELASTIC_RUN_ID, self.run_id.clone()),
            (names::LOCAL_RANK, self.told_local_rank(place).to_string()),
        ];
        env.extend(self.omp.map(|threads| (names::OMP_NUM_THREADS, threads.to_string())));
        env.extend(self.devices_of(place, visible).map(|devices| (names::CUDA_VISIBLE_DEVICES, devices)));
        env.into_iter().map(|(name, value)| (name.into(), Some(value.into()))).collect()
    }

    fn told_local_rank(&self, place: &Place) -> usize {
        if self.virtual_local_rank { 0 } else { place.local_rank }
    }

    /// The GPUs that the worker shall see, if not all that the launcher sees.
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
