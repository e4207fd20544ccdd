//! What a task calls the keys that a `ds_config.json` may set. Most tasks have the same names; NJUNMT has its own.

/// The name that most tasks have, and NJUNMT's.
const NJUNMT: [(&str, &str); 16] = [
    ("DEVICE", "run_configs.device"),
    ("MODEL.HIDDEN_SIZE", "model_configs.d_model"),
    ("OPTIM.AMSGRAD", "optimizer_configs.optimizer_params.amsgrad"),
    (BASE_LR, "optimizer_configs.learning_rate"),
    ("OPTIM.BETAS", "optimizer_configs.optimizer_params.betas"),
    ("OPTIM.EPS", "optimizer_configs.optimizer_params.eps"),
    (CLIP, "optimizer_configs.grad_clip"),
    ("OPTIM.METHOD", "optimizer_configs.optimizer"),
    ("OPTIM.MOMENTUM", "optimizer_configs.optimizer_params.momentum"),
    ("OPTIM.SCHEDULER", "optimizer_configs.scheduler"),
    ("OPTIM.WEIGHT_DECAY", "optimizer_configs.weight_decay"),
    ("PRECISION", "run_configs.precision"),
    ("TRAIN.ACCUMULATE", "training_configs.update_cycle"),
    ("TRAIN.BATCH_SIZE", "training_configs.batch_size"),
    ("TRAIN.CSV", "run_configs.csv"),
    ("TRAIN.PRINT_FREQ", "training_configs.disp_freq"),
];

pub(super) const BASE_LR: &str = "OPTIM.BASE_LR";
pub(super) const CLIP: &str = "OPTIM.GRAD_CLIP";

/// The names of a task's keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Names {
    /// Those that most tasks have.
    Usual,
    /// Those of NJUNMT.
    Njunmt,
}

impl Names {
    /// The names of a table with these keys.
    pub(super) fn of(has: impl Fn(&str) -> bool) -> Self {
        if NJUNMT.iter().all(|(_, own)| has(own)) { Self::Njunmt } else { Self::Usual }
    }

    /// The task's name for a key. Keys that have no other name there keep theirs.
    pub(super) fn own(self, key: &str) -> &str {
        let own = NJUNMT.iter().find(|(usual, _)| self == Self::Njunmt && *usual == key);
        own.map_or(key, |(_, own)| own)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::table;
    use crate::gpt::GptConfig;
    use crate::nmt::NmtConfig;

    #[test]
    fn a_table_is_known_by_its_keys() {
        let names = |keys: Vec<String>| Names::of(|key| keys.iter().any(|own| own == key));
        let keys = |entries: Vec<crate::config::Entry>| entries.into_iter().map(|entry| entry.key).collect();
        assert_eq!(names(keys(table::entries(&NmtConfig::default()))), Names::Njunmt);
        assert_eq!(names(keys(table::entries(&GptConfig::default()))), Names::Usual);
        assert_eq!(Names::Njunmt.own("TRAIN.ACCUMULATE"), "training_configs.update_cycle");
        assert_eq!(Names::Njunmt.own("PARALLEL.ZERO"), "PARALLEL.ZERO");
        assert_eq!(Names::Usual.own("TRAIN.ACCUMULATE"), "TRAIN.ACCUMULATE");
    }
}
