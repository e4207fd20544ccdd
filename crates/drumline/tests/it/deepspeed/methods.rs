//! What each method of the engine does.

use drumline::config::deepspeed::{Argument, Given};
use drumline::data::{Cause, DistributedSampler, Loader, LoaderOptions, MapDataset, Sample, SamplerOptions};
use drumline::optim::{Sgd, SgdOptions, parameters};
use drumline::schedule::At;
use rank_test::ranks_test;

use super::super::trainer::{difference, same_on_all_ranks, weights};
use super::*;

ranks_test!(it_steps_at_the_end_of_each_window, 2, {
    let group = ProcessGroup::from_env()?;
    let (store, mut engine) = engine(&group, &config(json!({})))?;
    assert_eq!((engine.train_batch_size(), engine.gradient_accumulation_steps()), (SAMPLES as u64 * 4, 2));
    assert_eq!(engine.train_micro_batch_size_per_gpu(), SAMPLES as u64);
    let mut before = weights(&store);
    for number in 0..6 {
        let is_last = number % 2 == 1;
        assert_eq!(engine.is_gradient_accumulation_boundary(), is_last, "before micro-step {number}");
        let (x, y) = micro_batch(number, &group);
        let loss = engine.forward(&x)?.mse_loss(&y, tch::Reduction::Mean);
        engine.backward(&loss)?;
        assert_eq!(engine.is_gradient_accumulation_boundary(), is_last, "within micro-step {number}");
        engine.step()?;
        let after = weights(&store);
        assert_eq!(difference(&before, &after) > 0.0, is_last, "micro-step {number}");
        assert_eq!(engine.global_steps(), (number as u64).div_ceil(2));
        before = after;
    }
    assert_eq!((engine.micro_steps(), engine.global_samples()), (6, 36));
    assert_eq!((engine.get_global_grad_norm(), engine.loss_scale()?), (None, 1.0));
    same_on_all_ranks(&group, &store)?;
});

ranks_test!(an_evaluation_changes_nothing, 2, {
    let group = ProcessGroup::from_env()?;
    let (store, mut engine) = engine(&group, &config(json!({})))?;
    micro_step(&mut engine, 0)?;
    let before = weights(&store);
    engine.eval();
    let (x, _) = micro_batch(7, &group);
    let output = engine.forward(&x)?;
    assert!(!output.requires_grad());
    assert!(output.equal(&engine.module().forward(&x)));
    assert!(engine.evaluation(|net| net.forward(&x))?.equal(&output));
    engine.train();
    assert!(engine.is_gradient_accumulation_boundary(), "it was no micro-step");
    assert_eq!(difference(&before, &weights(&store)), 0.0);
    micro_step(&mut engine, 1)?;
    assert_eq!(engine.global_steps(), 1);
});

ranks_test!(in_fp16_an_overflow_skips_the_step_and_the_schedule, 2, {
    let group = ProcessGroup::from_env()?;
    let more = json!({
        "fp16": { "enabled": true, "initial_scale_power": 20, "hysteresis": 1, "loss_scale_window": 4 },
        "scheduler": { "type": "WarmupLR", "params": { "warmup_num_steps": 6, "warmup_max_lr": 0.05 } },
        "gradient_clipping": 1.0,
    });
    let (store, mut engine) = engine(&group, &config(more))?;
    let (mut skipped, mut applied) = (0, 0);
    for step in 0..12 {
        let (before, lr, scale) = (weights(&store), engine.get_lr(), engine.loss_scale()?);
        micro_steps(&mut engine, step * 2..step * 2 + 2)?;
        if engine.was_step_applied() {
            applied += 1;
            assert!(difference(&before, &weights(&store)) > 0.0 || lr[0] == 0.0);
        } else {
            skipped += 1;
            assert_eq!((difference(&before, &weights(&store)), engine.get_lr()), (0.0, lr));
            assert_eq!(engine.loss_scale()?, scale / 2.0);
        }
    }
    assert!(skipped > 0 && applied > 4, "{skipped} of 12 were skipped");
    assert_eq!(
        (engine.skipped_steps(), engine.global_steps()),
        (skipped, 12),
        "skipped ones are counted, too"
    );
    same_on_all_ranks(&group, &store)?;
});

ranks_test!(bf16_trains_f32_copies, 2, {
    let group = ProcessGroup::from_env()?;
    for stage in 0..=3 {
        let more = json!({ "bf16": { "enabled": true }, "zero_optimization": { "stage": stage } });
        let (_, mut exact) = engine(&group, &config(json!({})))?;
        let (store, mut engine) = engine(&group, &config(more))?;
        assert_eq!(store.variables()["0.weight"].kind(), tch::Kind::BFloat16);
        for number in 0..8 {
            let (rounded, exact) = (micro_step(&mut engine, number)?, micro_step(&mut exact, number)?);
            assert!((rounded - exact).abs() < 0.05 * exact.max(0.1), "stage {stage}: {rounded}, {exact}");
        }
    }
});

ranks_test!(no_sync_reduces_later, 2, {
    let group = ProcessGroup::from_env()?;
    for stage in 0..=2 {
        let zero = json!({ "zero_optimization": { "stage": stage } });
        let (store, mut engine_with) = engine(&group, &config(zero.clone()))?;
        let (plain, mut engine_without) = engine(&group, &config(zero))?;
        for number in 0..4 {
            let (x, y) = micro_batch(number, &group);
            let loss = engine_with.forward(&x)?.mse_loss(&y, tch::Reduction::Mean);
            if number % 2 == 0 {
                engine_with.no_sync(|| engine_with.backward(&loss))?;
            } else {
                engine_with.backward(&loss)?;
            }
            engine_with.step()?;
            micro_step(&mut engine_without, number)?;
        }
        assert_eq!(difference(&weights(&store), &weights(&plain)), 0.0, "stage {stage}");
    }
});

ranks_test!(the_programs_optimizer_and_schedule_count, 2, {
    let group = ProcessGroup::from_env()?;
    let (store, net) = net();
    let sgd = Sgd::new(parameters(&store), SgdOptions { lr: 0.5, momentum: 0.25, ..Default::default() })?;
    let config = json!({
        "train_batch_size": 6,
        "optimizer": { "type": "AdamW", "params": { "lr": "auto", "weight_decay": "auto" } },
    });
    let builder =
        deepspeed::builder(config.to_string()).accelerator(Accelerator::builder().group(&group).cpu());
    let builder = builder.optimizer(sgd).schedule(|at: At| at.base_lr / (1 + at.step) as f64);
    let mut engine = builder.initialize(net, &store)?;
    let lr = engine.autos().iter().find(|became| became.key == "optimizer.params.lr").unwrap();
    assert_eq!((lr.value.as_str(), lr.from.as_str()), ("0.5", "the optimizer's lr"));
    micro_steps(&mut engine, 0..3)?;
    assert_eq!((engine.global_steps(), engine.get_lr()), (3, vec![0.125]));
});

ranks_test!(a_prepared_loader_makes_the_steps, 2, {
    let group = ProcessGroup::from_env()?;
    let (store, net) = net();
    let load = |sample: Sample| Ok(sample.index as f32 / 16.0);
    let batch = |values: Vec<f32>| {
        let x = Tensor::from_slice(&values).view([-1, 1]);
        Ok::<_, Cause>((x.expand([-1, 5], false), x.expand([-1, 2], false)))
    };
    let sampler = DistributedSampler::new(SamplerOptions { num_samples: 29, ..Default::default() })?;
    let options = LoaderOptions { batch_size: 3, ..Default::default() };
    let loader = Loader::new(MapDataset::new(29, load, batch), sampler, options)?;
    let config = config(json!({ "train_micro_batch_size_per_gpu": "auto" }));
    let builder =
        deepspeed::builder(config.to_string()).accelerator(Accelerator::builder().group(&group).cpu());
    let (mut engine, loader) = builder.initialize_with(net, &store, loader)?;
    let mut losses = Vec::new();
    for epoch in 0..6 {
        let mut batches = loader.epoch(epoch);
        let loss = |net: &Net, (x, y): &(Tensor, Tensor)| net.forward(x).mse_loss(y, tch::Reduction::Mean);
        while let Some(loss) = engine.train_batch(&mut batches, loss)? {
            losses.push(loss);
        }
    }
    // 29 samples: two windows of 12, and one of 5.
    assert_eq!((losses.len(), engine.global_steps()), (18, 18));
    assert!(losses[17] < losses[0], "{losses:?}");
    same_on_all_ranks(&group, &store)?;
});

ranks_test!(wrong_settings_are_errors_on_all_ranks, 2, {
    let group = ProcessGroup::from_env()?;
    let message = |config: Value| engine(&group, &config).map(drop).unwrap_err().to_string();
    let said = message(json!({ "train_batch_size": 7, "train_micro_batch_size_per_gpu": 2 }));
    assert!(said.contains('7') && said.contains("; try"), "{said}");
    let said = message(config(
        json!({ "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto" }),
    ));
    assert!(said.contains("train_micro_batch_size_per_gpu"), "{said}");
    let disk = json!({ "stage": 3, "offload_optimizer": { "device": "nvme", "nvme_path": "/tmp" } });
    let said = message(config(json!({ "zero_optimization": disk })));
    assert!(said.contains("optimizer state only to the CPU"), "{said}");
    let said = message(config(json!({ "gradient_clipping": group.rank() as f64 + 1.0 })));
    assert!(
        said.contains("another configuration of DeepSpeed") && said.contains("gradient_clipping"),
        "{said}"
    );
    let devices = ["cpu", "none"];
    let stage_1 = |device: &str| json!({ "stage": 1, "offload_optimizer": { "device": device } });
    let said = message(config(json!({ "zero_optimization": stage_1(devices[group.rank()]) })));
    assert!(
        said.contains("another configuration of DeepSpeed") && said.contains("offload_optimizer"),
        "{said}"
    );
    // The control: the same place on all ranks.
    engine(&group, &config(json!({ "zero_optimization": stage_1(devices[0]) })))?;
    let (store, net) = net();
    let accelerator = Accelerator::builder().group(&group).cpu();
    let given = Given { lr: Some(Argument::given("--lr", 0.1)), ..Given::default() };
    let missing = deepspeed::builder("/no/such/ds_config.json").accelerator(accelerator).given(given);
    let said = missing.initialize(net, &store).map(drop).unwrap_err().to_string();
    assert!(said.contains("/no/such/ds_config.json"), "{said}");
});

// The lines that rank 0 writes, and the folder in which it does.
ranks_test!(figures_go_to_csv_files_and_event_files, 2, {
    let group = ProcessGroup::from_env()?;
    let folder = group.broadcast_object(Some(&tempfile::tempdir()?.keep()), 0)?;
    let more = json!({
        "csv_monitor": { "enabled": true, "output_path": folder, "job_name": "job" },
        "tensorboard": { "enabled": true, "output_path": folder, "job_name": "events" },
        "wall_clock_breakdown": true,
        "steps_per_print": 2,
    });
    let (_, mut engine) = engine(&group, &config(more))?;
    micro_steps(&mut engine, 0..6)?;
    group.barrier()?;
    let read = |name: &str| std::fs::read_to_string(folder.join("job").join(name)).unwrap();
    assert_eq!(read("Train_Samples_lr.csv"), "step,lr\n12,0.05\n24,0.05\n36,0.05\n");
    for name in ["train_loss", "elapsed_time_ms_forward", "elapsed_time_ms_backward", "elapsed_time_ms_step"]
    {
        let text = read(&format!("Train_Samples_{name}.csv"));
        let lines: Vec<_> = text.lines().collect();
        assert_eq!((lines.len(), lines[0]), (4, format!("step,{name}").as_str()), "{text}");
        let value: f64 = lines[3].strip_prefix("36,").unwrap().parse()?;
        assert!(value > 0.0, "{text}");
    }
    assert!(!folder.join("job/Train_Samples_loss_scale.csv").exists(), "it is for fp16");
    assert_eq!(std::fs::read_dir(folder.join("events"))?.count(), 1, "rank 0 alone writes");
    group.barrier()?;
    if group.rank() == 0 {
        std::fs::remove_dir_all(folder)?;
    }
});

ranks_test!(a_folder_of_figures_that_cannot_be_written_is_an_error_at_once, 2, {
    let group = ProcessGroup::from_env()?;
    let more = json!({ "csv_monitor": { "enabled": true, "output_path": "/proc/none" } });
    let said = engine(&group, &config(more)).map(drop).unwrap_err().to_string();
    assert!(said.contains("csv_monitor.output_path cannot be used: cannot create /proc/none/"), "{said}");
});

ranks_test!(a_step_without_an_optimizer_is_an_error, 2, {
    let group = ProcessGroup::from_env()?;
    let (_store, mut engine) = engine(&group, &json!({ "train_batch_size": 6 }))?;
    assert!(engine.get_lr().is_empty());
    let said = micro_step(&mut engine, 0).unwrap_err().to_string();
    assert!(said.contains("there is no optimizer; try `optimizer` in the configuration"), "{said}");
});
