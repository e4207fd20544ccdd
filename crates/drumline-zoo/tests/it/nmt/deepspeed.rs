//! `--deepspeed` with NJUNMT's keys: the same training as with the keys themselves.

use super::{Task, column};

const DS: &str = r#"{
    "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 2,
    "gradient_clipping": "auto", "steps_per_print": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "adam_w_mode": false, "betas": [0.8, 0.99], "amsgrad": true}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20, "warmup_max_lr": "auto"}},
    "zero_optimization": {"stage": 1}, // a comment
    "csv_monitor": {"enabled": true, "output_path": "DIR/csv", "job_name": "job"},
    "tensorboard": {"enabled": true, "output_path": "elsewhere"},
}"#;

fn written(task: &Task, text: &str) -> String {
    let path = task.path("ds.json");
    std::fs::write(&path, text.replace("DIR", task.path("").to_str().unwrap())).unwrap();
    path.display().to_string()
}

fn without_schedule(task: &Task) {
    let config = task.read("nmt.yaml").replace("  learning_rate: 0.02\n", "");
    std::fs::write(task.path("nmt.yaml"), config).unwrap();
}

#[test]
fn a_file_trains_as_the_same_keys_do() {
    const KEYS: &str = "training_configs.max_steps 6 training_configs.update_cycle 2";
    let task = Task::new();
    let said = task.passes(
        2,
        &format!(
            "train --cfg DIR/nmt.yaml --deepspeed {} training_configs.max_steps 6 training_configs.disp_freq 1",
            written(&task, DS)
        ),
    );
    for words in [
        "optimizer_configs.optimizer adam; Adam",
        "optimizer_configs.learning_rate 0.01",
        "64, from training_configs.batch_size",
        "training_configs.update_cycle 2",
        "1, from optimizer_configs.grad_clip",
        "optimizer_configs.scheduler {",
        "optimizer_configs.optimizer_params.amsgrad true",
        "run_configs.csv",
    ] {
        assert!(said.contains(words), "{words}: {said}");
    }
    let theirs = [column(&task.events(), "step", "loss"), column(&task.events(), "step", "lr")];
    let csv = task.read("csv/job/Train_Samples_train_loss.csv");
    let lines: Vec<_> = csv.lines().collect();
    // A step has two batches of 64 tokens on each of two ranks.
    assert!(lines[0] == "step,train_loss" && lines[6].starts_with("1536,") && lines.len() == 7, "{csv}");
    let ours = Task::new();
    let optimizer = "optimizer_configs.optimizer adam optimizer_configs.learning_rate 0.01 \
                     optimizer_configs.optimizer_params.betas [0.8,0.99] \
                     optimizer_configs.optimizer_params.amsgrad true PARALLEL.ZERO 1 \
                     optimizer_configs.scheduler \
                     {type:WarmupLR,params:{warmup_num_steps:20,warmup_max_lr:0.01}}";
    ours.passes(2, &format!("train --cfg DIR/nmt.yaml training_configs.disp_freq 1 {KEYS} {optimizer}"));
    let ours = [column(&ours.events(), "step", "loss"), column(&ours.events(), "step", "lr")];
    assert_eq!(ours[0].len(), 6);
    assert_eq!(theirs, ours);
    let plain = Task::new();
    plain.passes(2, &format!("train --cfg DIR/nmt.yaml training_configs.disp_freq 1 {KEYS}"));
    assert_ne!(column(&plain.events(), "step", "loss"), ours[0], "control: the keys change the training");
}

#[test]
fn a_contradiction_names_the_keys_of_njunmt() {
    let task = Task::new();
    let file = written(
        &task,
        r#"{"train_micro_batch_size_per_gpu": 8, "optimizer": {"type": "SGD", "params": {"lr": "auto", "nesterov": true}},
            "scheduler": {"type": "WarmupLR"}}"#,
    );
    let ranks = task.run(2, &format!("train --cfg DIR/nmt.yaml --deepspeed {file}"));
    let said: String = ranks.iter().map(|rank| rank.stderr.as_str()).collect();
    for words in [
        "train_micro_batch_size_per_gpu is 8, and training_configs.batch_size (",
        // Noam's factor is no learning rate.
        "optimizer.params.lr is \"auto\", and nothing is given from which it follows; try a number",
    ] {
        assert!(said.contains(words), "{words}: {said}");
    }
    without_schedule(&task);
    let file = written(&task, r#"{"optimizer": {"type": "SGD", "params": {"nesterov": true}}}"#);
    let ranks = task.run(1, &format!("train --cfg DIR/nmt.yaml --deepspeed {file}"));
    assert!(
        ranks[0].stderr.contains("optimizer.params.nesterov has no key here; try false"),
        "{}",
        ranks[0].stderr
    );
}
