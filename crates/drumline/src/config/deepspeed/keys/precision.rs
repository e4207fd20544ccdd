//! Keys of precision and loss scaling.

use super::{Key, Kind};

pub(super) const KEYS: &[Key] = &[
    Key::new("fp16.enabled", Kind::Bool, "false")
        .auto("whether the precision that is given is fp16")
        .runs("computes in float16 with a scaled loss"),
    Key::new("fp16.auto_cast", Kind::Bool, "false")
        .idle("always: inputs are cast where an operation needs it"),
    Key::new("fp16.loss_scale", Kind::Number, "0")
        .runs("a constant loss scale; 0: a dynamic one, by the keys below"),
    Key::new("fp16.initial_scale_power", Kind::Whole, "16").runs("the first loss scale, as a power of 2"),
    Key::new("fp16.loss_scale_window", Kind::Whole, "1000")
        .runs("the scale doubles after this many steps without overflow"),
    Key::new("fp16.hysteresis", Kind::Whole, "2").runs("the scale halves after this many overflows"),
    Key::new("fp16.consecutive_hysteresis", Kind::Bool, "false")
        .runs("a step without overflow resets the count of overflows"),
    Key::new("fp16.min_loss_scale", Kind::Number, "1").runs("the lowest loss scale"),
    Key::new("fp16.fp16_master_weights_and_grads", Kind::Bool, "false")
        .refused("the weights that the optimizer changes are f32; try false"),
    Key::new("bf16.enabled", Kind::Bool, "false")
        .auto("whether the precision that is given is bf16")
        .runs("computes in bfloat16 with bfloat16 weights and f32 copies of them"),
    Key::new("bf16.immediate_grad_update", Kind::Bool, "false")
        .idle("gradients are reduced while backward runs"),
    Key::new("bf16.check_grad_overflow", Kind::Bool, "false")
        .idle("a loss that is not finite ends the run with an error"),
    Key::new("bf16.bf16_master_weights_and_grads", Kind::Bool, "false")
        .refused("the weights that the optimizer changes are f32; try false"),
    Key::new("bf16.bf16_optimizer_states", Kind::Bool, "false")
        .refused("DeepSpeed's form of it needs bfloat16 master weights; try false"),
    Key::new("torch_autocast.enabled", Kind::Bool, "false")
        .runs("f32 weights, and `dtype` in matrix products and convolutions"),
    Key::new("torch_autocast.dtype", Kind::Choice(&["bfloat16", "float16", "bf16", "fp16"]), "bfloat16")
        .runs("the data type of autocast"),
    Key::new("torch_autocast.lower_precision_safe_modules", Kind::Texts, "")
        .idle("autocast knows operations, not modules"),
    Key::new("amp", Kind::Block, "")
        .refused("it is NVIDIA Apex; try \"fp16\", \"bf16\" or \"torch_autocast\""),
];
