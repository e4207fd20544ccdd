//! ZeRO's stage, hybrid sharding, and offload.

use super::Resolver;
use crate::config::deepspeed::plan::{Compute, OffloadDevice, OffloadPlan, ZeroPlan};
use crate::engine::Stage;

const STAGE: &str = "zero_optimization.stage";
const MICS: &str = "zero_optimization.mics_shard_size";
const PERSISTENCE: &str = "zero_optimization.stage3_param_persistence_threshold";
const REDUCE: &str = "communication_data_type";

impl Resolver<'_> {
    pub(super) fn zero(&mut self) -> Option<ZeroPlan> {
        let stage = match self.config.text(STAGE).value() {
            Some(number) => number.parse().unwrap_or(Stage::Zero0),
            None if self.config.has_section("zero_optimization") => Stage::Zero0,
            None => return None,
        };
        if stage < Stage::Zero3 {
            let keys = self.config.settings().iter().filter_map(|setting| setting.key());
            let of_stage_3: Vec<_> = keys.filter(|key| key.name().starts_with("stage3_")).collect();
            for key in of_stage_3 {
                self.inactive(key.path, "only stage 3 reads it");
            }
            self.inactive(MICS, "only stage 3 reads it");
            self.inactive("zero_optimization.offload_param", "only stage 3 reads it");
        }
        if stage == Stage::Zero0 {
            self.inactive("zero_optimization.offload_optimizer", "stage 0 divides and offloads nothing");
        }
        self.check_foreign(stage);
        let keep_gathered = self.keep_gathered();
        Some(ZeroPlan { stage, shard: self.mics(stage), keep_gathered })
    }

    fn keep_gathered(&mut self) -> u64 {
        let written = self.config.whole(PERSISTENCE);
        match (written.is_auto(), self.given.hidden_size) {
            (true, Some(hidden)) => 10 * hidden,
            _ => written.value().unwrap_or(100_000),
        }
    }

    /// MiCS: ranks that hold a copy of the model together.
    fn mics(&mut self, stage: Stage) -> Option<u64> {
        let size = self.config.number(MICS).value().filter(|size| *size > 0.0)? as u64;
        if stage < Stage::Zero3 {
            return None;
        }
        let ranks = self.given.num_ranks.max(1);
        if !ranks.is_multiple_of(size) {
            self.problem(
                MICS,
                format!("is {size}, which does not divide {ranks} ranks; try a divisor of {ranks}"),
            );
        }
        Some(size)
    }

    /// An optimizer of the program's own needs permission.
    fn check_foreign(&mut self, stage: Stage) {
        const ALLOW: &str = "zero_allow_untested_optimizer";
        let Some(name) = self.given.foreign_optimizer.clone().filter(|_| stage > Stage::Zero0) else {
            return;
        };
        if !self.is_on(ALLOW) {
            let what = format!(
                "is not true, and ZeRO is to divide {name}, which is not one of Drumline's; try true"
            );
            self.problem(ALLOW, what);
        }
    }

    pub(super) fn offload(&mut self, zero: Option<ZeroPlan>) -> OffloadPlan {
        const FORCE: &str = "zero_force_ds_cpu_optimizer";
        let stage = zero.map_or(Stage::Zero0, |zero| zero.stage);
        let optimizer = self.device("offload_optimizer").filter(|_| stage > Stage::Zero0);
        let parameters = self.device("offload_param").filter(|_| stage == Stage::Zero3);
        let ratio = self.ratio(stage);
        if let Some(name) = self.given.foreign_optimizer.clone().filter(|_| optimizer.is_some())
            && self.config.bool(FORCE).value().unwrap_or(true)
        {
            let what = format!(
                "is not false, and {name} is to be offloaded, which is not one of Drumline's; try false"
            );
            self.problem(FORCE, what);
        }
        OffloadPlan { optimizer, optimizer_ratio: ratio, parameters }
    }

    fn device(&mut self, section: &str) -> Option<OffloadDevice> {
        let path = |key: &str| format!("zero_optimization.{section}.{key}");
        let folder = self.config.text(&path("nvme_path")).value();
        match self.config.text(&path("device")).value()?.as_str() {
            "cpu" => Some(OffloadDevice::Cpu),
            "nvme" => match folder {
                Some(folder) => Some(OffloadDevice::Disk(folder.into())),
                None => {
                    self.problem(
                        &path("device"),
                        "is nvme without nvme_path; try \"nvme_path\": \"/tmp/swap\"",
                    );
                    None
                }
            },
            _ => None,
        }
    }

    fn ratio(&mut self, stage: Stage) -> f64 {
        const RATIO: &str = "zero_optimization.offload_optimizer.ratio";
        let ratio = self.number_or(RATIO, 1.0);
        if !(0.0..=1.0).contains(&ratio) {
            self.problem(RATIO, format!("is {ratio}; try 0 to 1"));
        } else if ratio < 1.0 && stage != Stage::Zero3 {
            self.problem(RATIO, format!("is {ratio}, and only stage 3 has parts; try 1.0, or stage 3"));
        }
        ratio
    }

    /// The 16-bit type in which gradients are reduced.
    pub(super) fn reduce_in(&mut self, zero: Option<ZeroPlan>) -> Option<Compute> {
        let compute = match self.config.text(REDUCE).value()?.as_str() {
            "fp16" | "float16" | "half" => Compute::Fp16,
            "bf16" | "bfloat16" => Compute::Bf16,
            _ => return None,
        };
        if zero.is_some_and(|zero| zero.stage > Stage::Zero0) {
            self.inactive(REDUCE, "with ZeRO gradients are reduced in their own data type");
            return None;
        }
        Some(compute)
    }
}
