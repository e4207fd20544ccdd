//! Keys of optimizers and schedules.

use super::{Key, Kind};

pub(super) const KEYS: &[Key] = &[
    Key::new("optimizer.type", Kind::Text, "")
        .runs("Adam (which is AdamW unless adam_w_mode is false), AdamW, Lamb, Lion, SGD, Adagrad; others are refused by name"),
    Key::new("optimizer.legacy_fusion", Kind::Bool, "false").idle("optimizers are always fused"),
    Key::new("optimizer.params.lr", Kind::Number, "0.001")
        .auto("the learning rate that is given")
        .runs("learning rate"),
    Key::new("optimizer.params.betas", Kind::Numbers, "[0.9, 0.999]")
        .auto("the betas that are given")
        .runs("decay rates of Adam, Lamb and Lion"),
    Key::new("optimizer.params.eps", Kind::Number, "1e-8")
        .auto("the epsilon that is given")
        .runs("epsilon of Adam and Lamb; of Adagrad, whose default is 1e-10"),
    Key::new("optimizer.params.weight_decay", Kind::Number, "0")
        .auto("the weight decay that is given")
        .runs("weight decay; AdamW by PyTorch's class (torch_adam): 0.01"),
    Key::new("optimizer.params.adam_w_mode", Kind::Bool, "true")
        .runs("Adam: decoupled weight decay, which makes it AdamW"),
    Key::new("optimizer.params.torch_adam", Kind::Bool, "false").idle("there is one Adam, which equals PyTorch's"),
    Key::new("optimizer.params.bias_correction", Kind::Bool, "true").idle("always: moments are corrected for their start"),
    Key::new("optimizer.params.amsgrad", Kind::Bool, "false").runs("Adam: AMSGrad"),
    Key::new("optimizer.params.momentum", Kind::Number, "0").runs("momentum of SGD"),
    Key::new("optimizer.params.dampening", Kind::Number, "0").runs("dampening of SGD's momentum"),
    Key::new("optimizer.params.nesterov", Kind::Bool, "false").runs("Nesterov's momentum in SGD"),
    Key::new("optimizer.params.lr_decay", Kind::Number, "0").runs("Adagrad: how fast the learning rate falls"),
    Key::new("optimizer.params.initial_accumulator_value", Kind::Number, "0")
        .runs("Adagrad: the sum of squared gradients before the first step"),
    Key::new("optimizer.params.max_coeff", Kind::Number, "10").runs("Lamb: highest trust ratio"),
    Key::new("optimizer.params.min_coeff", Kind::Number, "0.01").runs("Lamb: lowest trust ratio"),
    Key::new("optimizer.params.max_grad_norm", Kind::Number, "0").refused("try gradient_clipping"),
    Key::new("optimizer.params.set_grad_none", Kind::Bool, "true").idle("gradients have their place in a bucket"),
    Key::new("optimizer.params.freeze_step", Kind::Whole, "").idle("is for 1-bit optimizers, which are refused by name"),
    Key::new("optimizer.params.comm_backend_name", Kind::Text, "").idle("is for 1-bit optimizers"),
    Key::new("optimizer.params.cuda_aware", Kind::Bool, "false").idle("is for 1-bit optimizers"),
    Key::new("optimizer.params.var_freeze_step", Kind::Whole, "").idle("is for 0/1 Adam"),
    Key::new("optimizer.params.var_update_scaler", Kind::Whole, "").idle("is for 0/1 Adam"),
    Key::new("optimizer.params.local_step_scaler", Kind::Whole, "").idle("is for 0/1 Adam"),
    Key::new("optimizer.params.local_step_clipper", Kind::Whole, "").idle("is for 0/1 Adam"),
    Key::new("optimizer.params.coeff_beta", Kind::Number, "0.9").idle("is for 1-bit Lamb"),
    Key::new("optimizer.params.factor_max", Kind::Number, "4.0").idle("is for 1-bit Lamb"),
    Key::new("optimizer.params.factor_min", Kind::Number, "0.5").idle("is for 1-bit Lamb"),
    Key::new("optimizer.params.factor_threshold", Kind::Number, "0.1").idle("is for 1-bit Lamb"),
    Key::new("optimizer.params.muon_lr", Kind::Number, "").idle("is for Muon, which is refused by name"),
    Key::new("optimizer.params.adam_lr", Kind::Number, "").idle("is for Muon"),
    Key::new("optimizer.params.ns_method", Kind::Text, "gram").idle("is for Muon"),
    Key::new("scheduler.type", Kind::Text, "")
        .runs("WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest; others are refused by name"),
    Key::new("scheduler.params.warmup_min_lr", Kind::Number, "0").auto("0").runs("learning rate of the first step"),
    Key::new("scheduler.params.warmup_max_lr", Kind::Number, "")
        .auto("the optimizer's learning rate")
        .runs("learning rate after the warm-up"),
    Key::new("scheduler.params.warmup_num_steps", Kind::Whole, "1000")
        .auto("the warm-up that is given")
        .runs("steps of the warm-up, at least 2"),
    Key::new("scheduler.params.warmup_type", Kind::Choice(&["log", "linear"]), "log").runs("how the warm-up rises"),
    Key::new("scheduler.params.total_num_steps", Kind::Whole, "")
        .auto("the number of steps of the training")
        .runs("steps until the decay ends"),
    Key::new("scheduler.params.warmup_min_ratio", Kind::Number, "0").runs("WarmupCosineLR: fraction of the first step"),
    Key::new("scheduler.params.cos_min_ratio", Kind::Number, "0.0001").runs("WarmupCosineLR: fraction at the end"),
    Key::new("scheduler.params.lr_range_test_min_lr", Kind::Number, "0.001").runs("LRRangeTest: first learning rate"),
    Key::new("scheduler.params.lr_range_test_step_size", Kind::Whole, "2000").runs("LRRangeTest: steps of a rise"),
    Key::new("scheduler.params.lr_range_test_step_rate", Kind::Number, "1").runs("LRRangeTest: how fast it rises"),
    Key::new("scheduler.params.lr_range_test_staircase", Kind::Bool, "false").runs("LRRangeTest: in stairs"),
    Key::new("scheduler.params.cycle_min_lr", Kind::Number, "").runs("OneCycle: learning rate at both ends"),
    Key::new("scheduler.params.cycle_max_lr", Kind::Number, "").runs("OneCycle: learning rate at the top"),
    Key::new("scheduler.params.decay_lr_rate", Kind::Number, "0").runs("OneCycle: decay after the cycle"),
    Key::new("scheduler.params.cycle_first_step_size", Kind::Whole, "2000").runs("OneCycle: steps up"),
    Key::new("scheduler.params.cycle_second_step_size", Kind::Whole, "").runs("OneCycle: steps down; as many as up"),
    Key::new("scheduler.params.cycle_first_stair_count", Kind::Whole, "0").runs("OneCycle: stairs on the way up"),
    Key::new("scheduler.params.cycle_second_stair_count", Kind::Whole, "").runs("OneCycle: stairs on the way down"),
    Key::new("scheduler.params.decay_step_size", Kind::Whole, "0").runs("OneCycle: steps between decays"),
    Key::new("scheduler.params.cycle_momentum", Kind::Bool, "true")
        .runs("OneCycle: whether the momentum is cycled, which is the first beta; the second one is 0.99 then"),
    Key::new("scheduler.params.cycle_min_mom", Kind::Number, "0.8").runs("OneCycle: momentum at the top"),
    Key::new("scheduler.params.cycle_max_mom", Kind::Number, "0.9").runs("OneCycle: momentum at both ends"),
    Key::new("scheduler.params.decay_mom_rate", Kind::Number, "0").runs("OneCycle: growth of the momentum after the cycle"),
    Key::new("scheduler.params.last_batch_iteration", Kind::Integer, "-1").idle("checkpoints know the step"),
];
