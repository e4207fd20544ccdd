//! What goes wrong on one rank is told once, and what makes no sense is told at once.

use std::process::ExitCode;

use drumline::DdpOptions;
use drumline::trainer::Precision;
use rank_test::ranks_test;

use super::*;

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
        let report = ranks.start()?.wait_all(std::time::Duration::from_secs(60))?;
        assert_told_once(&report, "rank 1: ");
        assert!(report.ranks[0].stderr_text().contains("no such file"), "{report}");
    }
);

ranks_test!(what_makes_no_sense_is_told, 2, {
    let told = |builder: AcceleratorBuilder| builder.build().unwrap_err().to_string();
    let group = drumline::ProcessGroup::from_env()?;
    let builder = || Accelerator::builder().group(&group);
    assert!(told(builder().gradient_accumulation_steps(0)).contains("is 0, expected at least 1; try 1"));
    assert!(told(builder().precision(Precision::Fp16)).contains("try Precision::Bf16"));
    let accelerator = builder().build()?;
    let options = SamplerOptions::in_group(SAMPLES, &group);
    let shared = Loader::new(data(SAMPLES), DistributedSampler::new(options)?, LoaderOptions::default())?;
    let error = accelerator.prepare_loader(shared).unwrap_err().to_string();
    assert!(error.contains("already shared out over 2 ranks; try"), "{error}");
    let lonely = accelerator.backward(&Tensor::from(1f32)).unwrap_err().to_string();
    assert!(lonely.contains("0 are prepared"), "{lonely}");
    let store = VarStore::new(Device::Cpu);
    let _model = accelerator.prepare_model(Net::new(&store), &store, DdpOptions::default())?;
    let stateless = accelerator.save_state("nowhere").unwrap_err().to_string();
    assert!(stateless.contains("1 and 0 are prepared"), "{stateless}");
    // A loop whose batches weigh nothing.
    let loader = accelerator.prepare_loader(whole(data(4), 2)?)?.weighing(|_| 0.0);
    let error = loader.epoch(0).next().unwrap().unwrap_err().to_string();
    assert!(error.contains("weigh 0 together; try"), "{error}");
});
