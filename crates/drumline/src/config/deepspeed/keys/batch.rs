//! Keys of batch sizes, clipping, gradients and reports.

use super::{Key, Kind};

const DTYPES: Kind =
    Kind::Choice(&["fp32", "fp16", "bf16", "float32", "float16", "bfloat16", "float", "half"]);

pub(super) const KEYS: &[Key] = &[
    Key::new("train_batch_size", Kind::Whole, "")
        .auto("micro-batch × accumulation × ranks")
        .runs("samples of a step on all ranks; any one of the three sizes follows from the others"),
    Key::new("train_micro_batch_size_per_gpu", Kind::Whole, "")
        .auto("the batch size that is given")
        .runs("samples of a forward on one rank"),
    Key::new("gradient_accumulation_steps", Kind::Whole, "")
        .auto("the accumulation that is given, else 1")
        .runs("micro-batches of a step"),
    Key::new("gradient_clipping", Kind::Number, "0.0")
        .auto("the norm that is given")
        .runs("clips the norm of the gradient of all ranks; 0 does not"),
    Key::new("prescale_gradients", Kind::Bool, "false")
        .idle("always: gradients are divided by the number of ranks before they are summed"),
    Key::new("gradient_predivide_factor", Kind::Number, "1.0")
        .idle("gradients are divided by the number of ranks before they are summed, and by nothing after"),
    Key::new("gradient_allreduce_op", Kind::Choice(&["mean", "sum"]), "mean")
        .refused("gradients are averaged; try a learning rate that is larger by the number of ranks"),
    Key::new("sparse_gradients", Kind::Bool, "false").idle("gradients of embeddings are dense here"),
    Key::new("communication_data_type", DTYPES, "")
        .runs("stage 0: sends gradients in 16 bits; fp32 is what the other stages do"),
    Key::new("seq_parallel_comm_data_type", DTYPES, "fp32").idle("sequences are not divided among ranks"),
    Key::new("data_types.grad_accum_dtype", DTYPES, "")
        .idle("micro-batches are accumulated in the data type of the gradients"),
    Key::new("disable_allgather", Kind::Bool, "false")
        .idle("an old name for other collectives with the same result"),
    Key::new("managed_gradient_accumulation", Kind::Bool, "true")
        .refused("the engine counts micro-batches; try gradient_accumulation_steps 1 and a loop of your own"),
    Key::new("zero_allow_untested_optimizer", Kind::Bool, "false")
        .runs("with ZeRO, an optimizer that the program brings is an error without it"),
    Key::new("zero_force_ds_cpu_optimizer", Kind::Bool, "true")
        .runs("with offload, an optimizer that the program brings is an error with it"),
    Key::new("dataloader_drop_last", Kind::Bool, "false")
        .runs("drops the samples that do not fill a batch; in `drumline train` the task decides"),
    Key::new("steps_per_print", Kind::WholeOrInfinity, "")
        .runs("steps between reports; in `drumline train` `TRAIN.PRINT_FREQ`"),
    Key::new("wall_clock_breakdown", Kind::Bool, "false").runs(
        "the engine logs the times of forward, backward and step; `drumline watch` always shows those of `drumline train`",
    ),
    Key::new("memory_breakdown", Kind::Bool, "false").idle("`drumline watch` shows the memory of each rank"),
    Key::new("dump_state", Kind::Bool, "false").idle("what the file became is always printed once"),
];
