//! Files as people write them (`tests/ds_config`), DeepSpeed's own cases of batch sizes, and what `"auto"` becomes.
//!
//! The first lines of each file say what must happen: `fine`, `mistake: WORDS`, `broken: WORDS`; then `says KEY: WORDS` of
//! the explanation, `strict: WORDS` with strictness, `alone` if nothing but ranks is given, `explicit` if arguments are.

use std::path::Path;

use drumline_torch::{DeepSpeedScale, ScalePolicy};

use crate::config::deepspeed::{
    Argument, BatchPlan, Betas, Compute, DeepSpeedConfig, DeepSpeedPlan, Given, KEYS, OffloadDevice,
    OptimizerPlan, Resolved, StepCounts, WarmupLength,
};
use crate::engine::Stage;
use crate::schedule::{At, LrPolicy};

/// What a program gives that has everything, on 2 ranks.
fn program(is_default: bool) -> Given {
    fn argument<T>(name: &str, value: T, is_default: bool) -> Option<Argument<T>> {
        Some(Argument { value, name: name.to_owned(), is_default })
    }
    Given {
        micro_batch: argument("the program's batch size", 4, is_default),
        accumulation: argument("the program", 2, is_default),
        clip_norm: argument("the program", 1.0, is_default),
        compute: argument("the program", Compute::F32, true),
        lr: argument("the program", 3e-5, true),
        betas: argument("the program", Betas(0.8, 0.999), true),
        eps: argument("the program", 1e-8, true),
        weight_decay: argument("the program", 3e-7, true),
        warmup: argument("the program", WarmupLength::Fraction(0.1), true),
        steps: StepCounts::Total(Argument::default("the program", 5000)),
        hidden_size: Some(64),
        ..Given::ranks(2)
    }
}

/// The lines of comments with which a file begins.
struct Head {
    words: Vec<String>,
}

impl Head {
    fn of(text: &str) -> Self {
        let comments = text.lines().map_while(|line| line.strip_prefix("// "));
        Self { words: comments.map(str::to_owned).collect() }
    }

    fn all<'a>(&'a self, name: &str) -> impl Iterator<Item = &'a str> {
        let begin = format!("{name}: ");
        self.words.iter().filter_map(move |line| line.strip_prefix(begin.as_str()))
    }

    fn has(&self, word: &str) -> bool {
        self.words.iter().any(|line| line == word)
    }
}

#[test]
fn files_as_people_write_them_are_used_or_refused_with_the_reason() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/ds_config");
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(files.len() >= 60, "{} files", files.len());
    files.iter().for_each(|file| check_file(file));
}

fn check_file(file: &Path) {
    let name = file.file_stem().unwrap().to_string_lossy().into_owned();
    let head = Head::of(&std::fs::read_to_string(file).unwrap());
    let config = match DeepSpeedConfig::read(file) {
        Ok(config) => config,
        Err(error) => {
            let expected = head.all("broken").next().unwrap_or_else(|| panic!("{name}: {error}"));
            return assert!(error.to_string().contains(expected), "{name}: {error}");
        }
    };
    assert!(head.has("fine") || head.all("mistake").next().is_some(), "{name}: expected an error");
    let given = if head.has("alone") { Given::ranks(2) } else { program(!head.has("explicit")) };
    let resolved = config.resolve(&given).map_err(|error| error.to_string());
    match head.all("mistake").next() {
        Some(words) => {
            let error = resolved.unwrap_err();
            assert!(error.contains(words), "{name}: expected {words}, got {error}");
        }
        None => assert!(resolved.is_ok(), "{name}: {resolved:?}"),
    }
    let strict = Given { is_strict: true, ..given.clone() };
    for words in head.all("strict") {
        let error = config.resolve(&strict).unwrap_err().to_string();
        assert!(error.contains(words), "{name}: expected {words}, got {error}");
    }
    check_explanation(&name, &config, &given, &head);
}

/// Every line of every file is explained, also if the file cannot be used.
fn check_explanation(name: &str, config: &DeepSpeedConfig, given: &Given, head: &Head) {
    let explained = config.explain(given);
    assert_eq!(explained.lines.len(), config.settings().len());
    for line in &explained.lines {
        assert!(!line.says.is_empty(), "{name}: {} is not explained", line.key);
    }
    let table = explained.to_string();
    for says in head.all("says") {
        let (key, words) = says.split_once(": ").unwrap();
        let line = explained.lines.iter().find(|line| line.key == key);
        let line = line.unwrap_or_else(|| panic!("{name}: no line {key}"));
        let shown = format!("{}: {}", line.effect, line.says);
        assert!(shown.contains(words), "{name}: {key}: expected {words}, got {shown}");
        assert!(table.contains(&line.says), "{name}: {table}");
    }
    serde_json::to_string(&explained).unwrap();
}

fn resolved(text: &str, given: &Given) -> Resolved {
    DeepSpeedConfig::parse("ds.json", text).unwrap().resolve(given).unwrap()
}

fn plan(text: &str) -> DeepSpeedPlan {
    resolved(text, &program(true)).plan
}

fn error(text: &str, given: &Given) -> String {
    DeepSpeedConfig::parse("ds.json", text).unwrap().resolve(given).unwrap_err().to_string()
}

/// The sizes of a file on so many ranks, when nothing is given.
fn batch(text: &str, num_ranks: u64) -> Result<[u64; 3], String> {
    let config = DeepSpeedConfig::parse("ds.json", text).unwrap();
    let plan = config.resolve(&Given::ranks(num_ranks)).map_err(|error| error.to_string())?.plan;
    let BatchPlan { train_batch, micro_batch, accumulation, .. } = plan.batch;
    Ok([train_batch, micro_batch, accumulation])
}

fn sizes(train: u64, micro: u64, accumulation: u64) -> String {
    let keys = [
        ("train_batch_size", train),
        ("train_micro_batch_size_per_gpu", micro),
        ("gradient_accumulation_steps", accumulation),
    ];
    let given = keys.iter().filter(|(_, size)| *size > 0).map(|(key, size)| format!("\"{key}\": {size}, "));
    format!("{{{}}}", given.collect::<String>())
}

/// A file in which one key has a value.
fn with_key(path: &str, value: &str) -> DeepSpeedConfig {
    let (begin, end) = (path.replace('.', "\": {\""), "}".repeat(path.matches('.').count()));
    DeepSpeedConfig::parse("ds.json", &format!("{{\"{begin}\": {value}}}{end}")).unwrap()
}

#[test]
fn every_key_is_explained_whatever_its_value() {
    for key in KEYS.iter() {
        let is_word = key.default.starts_with(|c: char| c.is_alphabetic());
        let usual = match key.default {
            "" => "null".to_owned(),
            word if is_word => format!("\"{word}\""),
            other => other.to_owned(),
        };
        for value in
            [usual.as_str(), "\"auto\"", "7", "-0.5", "true", "[1, 2]", "{\"enabled\": true}", "\"?\""]
        {
            let config = with_key(key.path, value);
            for given in [program(true), program(false), Given::ranks(1)] {
                let explained = config.explain(&given);
                let line = explained.lines.first().unwrap_or_else(|| panic!("{}: {value}", key.path));
                assert!(!line.says.is_empty(), "{}: {value}", key.path);
            }
        }
        let explained = with_key(key.path, &usual).explain(&program(true));
        let is_used = !matches!(explained.lines[0].effect, "mistake" | "refused" | "unknown");
        assert!(is_used, "{}: {explained}", key.path);
    }
}

#[test]
fn any_missing_batch_size_is_derived() {
    for (train, micro, accumulation, ranks) in [(32, 16, 1, 2), (32, 8, 2, 2), (96, 8, 4, 3), (1, 1, 1, 1)] {
        let all = Ok([train, micro, accumulation]);
        assert_eq!(batch(&sizes(train, micro, accumulation), ranks), all);
        assert_eq!(batch(&sizes(0, micro, accumulation), ranks), all);
        assert_eq!(batch(&sizes(train, 0, accumulation), ranks), all);
        assert_eq!(batch(&sizes(train, micro, 0), ranks), all);
    }
    assert_eq!(batch(&sizes(32, 0, 0), 2), Ok([32, 16, 1]));
    assert_eq!(batch(&sizes(0, 16, 0), 2), Ok([32, 16, 1]));
}

#[test]
fn sizes_that_do_not_fit_are_an_error_with_what_would() {
    let error = |train, micro, accumulation| batch(&sizes(train, micro, accumulation), 2).unwrap_err();
    assert_eq!(
        error(33, 17, 2),
        "ds.json:1:22: train_batch_size is 33, but micro-batch 17 × accumulation 2 × 2 ranks is 68; try train_batch_size 68"
    );
    let said = error(32, 18, 1);
    assert!(said.ends_with("try train_batch_size 36, or train_micro_batch_size_per_gpu 16"), "{said}");
    assert!(
        error(32, 4, 1)
            .contains("gradient_accumulation_steps 4, or train_micro_batch_size_per_gpu 16, or 8 ranks")
    );
    assert!(
        error(33, 0, 2)
            .ends_with("accumulation 2 × 2 ranks = 4 does not divide; try train_batch_size 32 or 36")
    );
    assert!(
        error(3, 8, 0).ends_with("micro-batch 8 × 2 ranks = 16 does not divide; try train_batch_size 16")
    );
    assert!(error(0, 0, 4).contains("train_micro_batch_size_per_gpu is not given"));
}

#[test]
fn what_is_given_fills_auto_and_a_default_gives_way() {
    let auto = r#"{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}"#;
    let resolved = resolved(auto, &program(true));
    assert_eq!(
        resolved.plan.batch,
        BatchPlan { train_batch: 16, micro_batch: 4, accumulation: 2, num_ranks: 2 }
    );
    let became: Vec<_> =
        resolved.autos.iter().map(|became| (became.key.as_str(), became.value.as_str())).collect();
    let expected = [
        ("train_micro_batch_size_per_gpu", "4"),
        ("gradient_accumulation_steps", "2"),
        ("train_batch_size", "16"),
    ];
    assert!(expected.iter().all(|one| became.contains(one)), "{became:?}");
    // The accumulation of 2 is a default, so that it follows from the whole batch instead.
    let whole = r#"{"train_batch_size": 64, "gradient_accumulation_steps": "auto"}"#;
    assert_eq!(plan(whole).batch.accumulation, 8);
    let error = error(whole, &program(false));
    assert!(
        error.contains("train_batch_size is 64, but micro-batch 4 × accumulation 2 × 2 ranks is 16"),
        "{error}"
    );
}

#[test]
fn all_that_differs_from_the_arguments_is_in_one_error() {
    let given = Given { lr: Some(Argument::given("--lr", 0.1)), ..program(false) };
    let text = r#"{"train_micro_batch_size_per_gpu": 8, "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}"#;
    let error = error(text, &given);
    let lines: Vec<_> = error.lines().collect();
    assert_eq!(lines.len(), 4, "{error}");
    assert!(lines[0].ends_with("ds.json has 3 mistakes:"));
    assert!(
        lines[3].contains("ds.json:2:57: optimizer.params.lr is 0.01, and --lr is 0.1; try \"auto\" here"),
        "{error}"
    );
}

#[test]
fn the_seeds_file_becomes_a_plan() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/ds_config/seed_002_zero2.json");
    let given = Given { compute: Some(Argument::given("--fp16", Compute::Fp16)), ..program(true) };
    let plan = DeepSpeedConfig::read(&file).unwrap().resolve(&given).unwrap().plan;
    let precision = plan.precision.unwrap();
    assert_eq!(precision.compute, Compute::Fp16);
    assert_eq!(precision.loss_scale, Some(ScalePolicy::DeepSpeed(DeepSpeedScale::default())));
    let OptimizerPlan::Adam(adam) = plan.optimizer.unwrap() else { panic!("AdamW") };
    assert_eq!((adam.lr, adam.betas, adam.weight_decay, adam.is_decoupled), (3e-5, (0.8, 0.999), 3e-7, true));
    let LrPolicy::WarmupLr(warmup) = plan.scheduler.unwrap().policy(None).unwrap() else {
        panic!("WarmupLR")
    };
    assert_eq!((warmup.warmup_num_steps, warmup.warmup_max_lr), (500, Some(3e-5)));
    assert_eq!(warmup.lr(0.0, At { step: 501, ..At::default() }), 3e-5);
    assert_eq!(plan.zero.unwrap().stage, Stage::Zero2);
    assert_eq!(plan.offload.optimizer, Some(OffloadDevice::Cpu));
    assert_eq!((plan.clip_norm, plan.steps_per_print), (Some(1.0), Some(2000)));
}

#[test]
fn adam_is_adamw_unless_the_file_says_otherwise() {
    let is_decoupled = |params: &str, name: &str| {
        let text = format!(
            r#"{{"train_batch_size": 8, "optimizer": {{"type": "{name}", "params": {{{params}}}}}}}"#
        );
        let Some(OptimizerPlan::Adam(adam)) = plan(&text).optimizer else { panic!("Adam") };
        adam.is_decoupled
    };
    assert!(is_decoupled("", "Adam") && is_decoupled("\"torch_adam\": true", "adam"));
    assert!(!is_decoupled("\"adam_w_mode\": false", "Adam"));
    assert!(is_decoupled("\"adam_w_mode\": false", "AdamW"));
}

#[test]
fn step_counts_may_wait_for_the_start() {
    let text = r#"{"train_batch_size": 8, "scheduler": {"type": "WarmupDecayLR",
        "params": {"total_num_steps": "auto", "warmup_num_steps": "auto", "warmup_max_lr": 0.1}}}"#;
    let given = Given { steps: StepCounts::AtStart, ..program(true) };
    let scheduler = resolved(text, &given).plan.scheduler.unwrap();
    assert!(scheduler.waits());
    let LrPolicy::WarmupDecayLr(decay) = scheduler.policy(Some(95)).unwrap() else { panic!("WarmupDecayLR") };
    assert_eq!((decay.total_num_steps, decay.warmup_num_steps), (95, 10));
    let unknown = scheduler.policy(None).unwrap_err().to_string();
    assert!(
        unknown.starts_with("scheduler.params of WarmupDecayLR depend on the number of steps"),
        "{unknown}"
    );
}

#[test]
fn an_optimizer_of_the_programs_own_needs_permission() {
    let given = Given { foreign_optimizer: Some("Sophia".to_owned()), ..program(true) };
    let zero = |keys: &str| {
        format!(
            r#"{{"train_batch_size": 8, {keys} "zero_optimization": {{"stage": 2, "offload_optimizer": {{"device": "cpu"}}}}}}"#
        )
    };
    let said = error(&zero(""), &given);
    assert!(
        said.contains("zero_allow_untested_optimizer is not true, and ZeRO is to divide Sophia"),
        "{said}"
    );
    assert!(
        said.contains("zero_force_ds_cpu_optimizer is not false, and Sophia is to be offloaded"),
        "{said}"
    );
    let allowed = r#""zero_allow_untested_optimizer": true, "zero_force_ds_cpu_optimizer": false,"#;
    resolved(&zero(allowed), &given);
}

#[test]
fn an_auto_without_a_rule_becomes_the_default() {
    let resolved = resolved(
        r#"{"train_batch_size": 8, "zero_optimization": {"stage": "auto", "sub_group_size": "auto"}}"#,
        &program(true),
    );
    let became: Vec<_> =
        resolved.autos.iter().map(|became| (became.key.as_str(), became.value.as_str())).collect();
    assert!(became.contains(&("zero_optimization.sub_group_size", "1e9")), "{became:?}");
    assert_eq!(resolved.plan.zero.unwrap().stage, Stage::Zero0);
}
