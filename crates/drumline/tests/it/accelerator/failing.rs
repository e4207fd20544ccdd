//! A failure of one rank is reported once, and misuse is an error at once.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use drumline::optim::{Adam, AdamOptions, Optimizer, ScalePolicy};
use drumline::trainer::Precision;
use drumline::{DdpOptions, ProcessGroup};
use rank_test::{Exit, Ranks, ranks_test};
use tch::Kind;
use tch::nn::ModuleT;

use super::super::trainer::FOLDER;
use super::*;

const LONGEST: Duration = Duration::from_secs(60);

fn end_as_a_program(outcome: anyhow::Result<()>) -> ! {
    let code = drumline::exit_code(outcome);
    std::process::exit(i32::from(format!("{code:?}") != format!("{:?}", ExitCode::SUCCESS)))
}

ranks_test!(
    a_sample_that_cannot_be_read_ends_all_ranks_with_one_text,
    2,
    {
        let bad = order(SAMPLES, 0)[9];
        let dataset =
            data_seen(SAMPLES, move |index| if index == bad { Err("no such file".into()) } else { Ok(()) });
        let mut training = training(Accelerator::builder(), dataset, 4)?;
        end_as_a_program(training.epoch(0));
    },
    |ranks| {
        let report = ranks.start()?.wait_all(LONGEST)?;
        assert_reported_once(&report, "rank 1: ");
        assert!(report.ranks[0].stderr_text().contains("no such file"), "{report}");
    }
);

ranks_test!(what_makes_no_sense_is_an_error_on_all_ranks_and_the_group_still_works, 2, {
    let message = |builder: AcceleratorBuilder| builder.build().unwrap_err().to_string();
    let group = ProcessGroup::from_env()?;
    let (rank, builder) = (group.rank(), || Accelerator::builder().group(&group));
    assert!(message(builder().gradient_accumulation_steps(0)).contains("is 0, expected at least 1; try 1"));
    let scaled = builder().precision(Precision::Fp16).loss_scale(ScalePolicy::Static(0.0));
    assert!(message(scaled).contains("the loss scale policy is Static(0.0)"));
    assert_eq!(
        message(builder().gradient_accumulation_steps(2 + rank)),
        "rank 1 was given another accelerator than rank 0: gradient_accumulation_steps is 3, expected 2; try the same on all ranks"
    );
    let accelerator = builder().build()?;
    let options = SamplerOptions::in_group(SAMPLES, &group);
    let shared = Loader::new(data(SAMPLES), DistributedSampler::new(options)?, LoaderOptions::default())?;
    let error = accelerator.prepare_loader(shared).unwrap_err().to_string();
    assert!(error.contains("already divided over 2 ranks; try"), "{error}");
    let error = accelerator.prepare_loader(whole(data(8 - rank), 2)?).unwrap_err().to_string();
    assert!(
        error.starts_with("rank 1 was given another loader than rank 0: number of samples is 7, expected 8"),
        "{error}"
    );
    let lonely = accelerator.backward(&Tensor::from(1f32)).unwrap_err().to_string();
    assert!(lonely.contains("0 are prepared"), "{lonely}");
    let stateless = accelerator.save_state("nowhere").unwrap_err().to_string();
    assert!(stateless.contains("there is no prepared model"), "{stateless}");
    let stateless = accelerator.load_state("nowhere").unwrap_err().to_string();
    assert!(stateless.contains("there is no prepared model"), "{stateless}");
    let store = VarStore::new(Device::Cpu);
    let _model = accelerator.prepare_model(Net::new(&store), &store, DdpOptions::default())?;
    let twice = accelerator.prepare_model(Net::new(&store), &store, DdpOptions::default());
    let twice = twice.unwrap_err().to_string();
    assert!(twice.contains("is part of a model that is prepared already; try"), "{twice}");
    // A loop whose batches weigh nothing.
    let loader = accelerator.prepare_loader(whole(data(4), 2)?)?.weighing(|_| 0.0);
    let error = loader.epoch(0).next().unwrap().unwrap_err().to_string();
    assert!(error.contains("a batch of 2 samples has a weight of 0, expected more than 0; try"), "{error}");
    accelerator.wait_for_everyone()?;
});

ranks_test!(
    a_setting_that_makes_no_sense_is_shown_once,
    3,
    {
        let built = Accelerator::builder().gradient_accumulation_steps(0).build();
        end_as_a_program(built.map(drop).map_err(Into::into));
    },
    |ranks| {
        let report = ranks.start()?.wait_all(LONGEST)?;
        assert_reported_once(&report, "gradient_accumulation_steps is 0");
    }
);

ranks_test!(
    a_loader_without_data_is_warned_of_once_and_has_no_batches,
    2,
    env = [("DRUMLINE_LOG", ""), ("RUST_LOG", "")],
    {
        drumline::init_logging(Default::default())?;
        let mut training = training(Accelerator::builder(), data(0), 4)?;
        training.epoch(0)?;
        assert_eq!(training.optimizer.steps(), 0);
        training.accelerator.wait_for_everyone()?;
    },
    |ranks| {
        let report = ranks.pass()?;
        let output: Vec<_> = report.ranks.iter().map(|rank| rank.stderr_text().into_owned()).collect();
        assert!(
            output[0].contains("no batch of 4 for each of 2 ranks") && output[1].is_empty(),
            "{output:?}"
        );
    }
);

/// Trains a little, and saves.
fn save(group: &ProcessGroup) -> anyhow::Result<()> {
    let mut training = training(Accelerator::builder().group(group), data(SAMPLES), 4)?;
    training.epoch(0)?;
    training.accelerator.save_state(folder()?)?;
    Ok(())
}

/// Why a model and an optimizer cannot resume from what was saved; their training then continues as before.
fn refusal<M: ModuleT + 'static, O: Optimizer + 'static>(
    group: &ProcessGroup,
    net: impl FnOnce(&VarStore) -> M,
    optimizer: impl FnOnce(&VarStore) -> anyhow::Result<O>,
) -> anyhow::Result<String> {
    let accelerator = Accelerator::builder().group(group).build()?;
    let store = VarStore::new(Device::Cpu);
    let model = accelerator.prepare_model(net(&store), &store, DdpOptions::default())?;
    let mut optimizer = accelerator.prepare_optimizer(optimizer(&store)?);
    let before = weights(&store);
    let message = accelerator.load_state(folder()?).unwrap_err().to_string();
    assert_eq!((difference(&weights(&store), &before), optimizer.steps()), (0.0, 0));
    let (x, _) = big_batches(8, 0).remove(0);
    accelerator.backward(&model.forward_t(&x, true).sum(Kind::Float))?;
    optimizer.step()?;
    same_on_all_ranks(group, &store)?;
    Ok(message)
}

ranks_test!(
    a_state_that_does_not_fit_is_refused_on_all_ranks_and_changes_nothing,
    2,
    {
        let group = ProcessGroup::from_env()?;
        save(&group)?;
        let other = |store: &VarStore| tch::nn::linear(store.root() / "other", 6, 2, Default::default());
        let message = refusal(&group, other, sgd)?;
        assert!(
            message.starts_with("cannot resume from") && message.contains("is of another model"),
            "{message}"
        );
        let adam =
            |store: &VarStore| Ok(Adam::new(drumline::optim::parameters(store), AdamOptions::default())?);
        let message = refusal(&group, Net::new, adam)?;
        assert!(message.contains("it is of `sgd`, and this optimizer is `adam`"), "{message}");
        // A folder that is not there is that of a run that has not begun; a file is none.
        let Training { accelerator, .. } = training(Accelerator::builder().group(&group), data(4), 2)?;
        assert!(accelerator.load_state(folder()?.join("nothing"))?.is_none());
        let file = folder()?.join(format!("file{}", group.rank()));
        std::fs::write(&file, "")?;
        end_as_a_program(accelerator.load_state(file).map(drop).map_err(Into::into));
    },
    |ranks| {
        let folder = tempfile::tempdir()?;
        let report = ranks.env([(FOLDER, folder.path())]).start()?.wait_all(LONGEST)?;
        assert_reported_once(&report, "cannot look for checkpoints in");
    }
);

/// What one rank does while the other continues.
#[derive(Debug, Clone, Copy)]
enum Misuse {
    GatherAlone,
    SaveAlone,
    LossOfNothing,
    LossOfNothingOnAll,
    NoSyncAlone,
    EndsEarly,
}

fn misused(misuse: Misuse) -> anyhow::Result<()> {
    let mut training = training(Accelerator::builder(), data(16), 2)?;
    let is_first = training.accelerator.is_main_process();
    for (turn, batch) in training.loader.epoch(0).enumerate() {
        let (batch, ones) = (batch?, Tensor::ones([1], (Kind::Float, Device::Cpu)));
        match misuse {
            _ if turn != 2 => training.backward(&batch)?,
            Misuse::LossOfNothing if is_first => training.accelerator.backward(&ones)?,
            Misuse::LossOfNothingOnAll => training.accelerator.backward(&ones)?,
            Misuse::NoSyncAlone if is_first => {
                training.accelerator.no_sync(|| training.backward(&batch))?;
            }
            Misuse::EndsEarly if is_first => anyhow::bail!("out of patience"),
            _ => training.backward(&batch)?,
        }
        match misuse {
            Misuse::GatherAlone if turn == 2 && is_first => drop(training.accelerator.gather(&ones)?),
            Misuse::SaveAlone if turn == 2 && is_first => drop(training.accelerator.save_state(folder()?)?),
            _ => {}
        }
        training.optimizer.step()?;
        training.optimizer.zero_grad()?;
    }
    Ok(())
}

/// All ranks end soon, with an error that gives the reason.
fn ends_with(ranks: &Ranks, misuse: Misuse, expected_text: &str) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let begin = Instant::now();
    let ranks = ranks.clone().env([(FOLDER, folder.path())]).env([(CASE, (misuse as usize).to_string())]);
    let report = ranks.start()?.wait_all(LONGEST)?;
    assert!(begin.elapsed() < Duration::from_secs(30), "{misuse:?}: {report}");
    let all: String = report.ranks.iter().map(|rank| rank.stderr_text().into_owned()).collect();
    assert!(report.ranks.iter().all(|rank| rank.exit == Exit::Code(1)), "{misuse:?}: {report}");
    let reported = all.matches(expected_text).count();
    assert!(
        reported == 1 || reported > 0 && expected_text.contains("different calls"),
        "{misuse:?}: {report}"
    );
    Ok(())
}

const CASE: &str = "DRUMLINE_TEST_MISUSE";

const CASES: [(Misuse, &str); 6] = [
    (Misuse::GatherAlone, "made different calls"),
    (Misuse::SaveAlone, "made different calls"),
    (Misuse::LossOfNothing, "the loss does not depend on anything that is trained; try"),
    (Misuse::LossOfNothingOnAll, "the loss does not depend on anything that is trained; try"),
    (Misuse::NoSyncAlone, "not reduced over ranks"),
    (Misuse::EndsEarly, "out of patience"),
];

ranks_test!(
    what_one_rank_does_alone_ends_all_with_words,
    2,
    {
        let case: usize = std::env::var(CASE)?.parse()?;
        end_as_a_program(misused(CASES[case].0))
    },
    |ranks| {
        CASES.iter().try_for_each(|(misuse, expected_text)| ends_with(&ranks, *misuse, expected_text))?;
    }
);
