//! A pipeline in which something fails: every rank returns an error within a second, which names what it did and what failed.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use drumline_comm::ProcessGroup;
use drumline_parallel::ParallelError;
use drumline_parallel::pipeline::{
    LayerList, LayerSpec, Linear, Order, Pipeline, PipelineError, PipelineOptions, Scale, layer_fn,
};
use drumline_plan::pipeline::{Program, Schedule};
use drumline_torch::autograd_function;
use rank_test::{Exit, JobReport, ranks_test};
use tch::{Device, Kind, Tensor};

use super::pipeline_model::{Variant, agreed, batches, layers, mesh, options, step};
use super::tensor::on_ranks;

/// What a layer does wrong.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Wrong {
    Nothing,
    Panic,
    Shape,
    PanicInBackward,
    ErrorInBackward,
    Kill,
    KillInBackward,
}

/// In which layer, and at which of its forwards.
#[derive(Debug, Clone, Copy)]
struct Fault {
    wrong: Wrong,
    layer: usize,
    call: usize,
}

static FAILED_AT: Mutex<Option<Instant>> = Mutex::new(None);

/// In much less than the timeout of their group ranks have learned of a failure, however busy the machine is.
pub(crate) const END_WITHIN: Duration = Duration::from_secs(20);

const SCHEDULES: [Schedule; 4] =
    [Schedule::OneFOneB, Schedule::ZeroBubbleV, Schedule::Interleaved, Schedule::GPipe];

/// How many failures are tried, and how long ranks may take to learn of one: a second where nothing else runs
/// (`PIPELINE_FAULTS=500`, `PIPELINE_KILLS=50`), and else [`END_WITHIN`].
fn runs_and_limit(variable: &str, usual: usize) -> (usize, Duration) {
    match std::env::var(variable) {
        Ok(runs) => (runs.parse().unwrap(), Duration::from_secs(1)),
        Err(_) => (usual, END_WITHIN),
    }
}

fn failing() {
    *FAILED_AT.lock().unwrap() = Some(Instant::now());
}

/// The time since 1970, which processes have in common.
fn since_1970() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap()
}

/// Ends this process, after the time.
fn kill() -> ! {
    println!("killed at {} ms", since_1970().as_millis());
    std::process::abort()
}

/// The tensor, unless its backward fails.
fn through(x: &Tensor, wrong: Wrong) -> Result<Tensor, drumline_torch::TorchError> {
    let made = autograd_function(
        &[x],
        |_, inputs| Ok(vec![inputs[0].f_mul_scalar(1.0)?]),
        move |_, _| {
            failing();
            match wrong {
                Wrong::PanicInBackward => panic!("a mistake in backward"),
                Wrong::KillInBackward => kill(),
                _ => Err("a refused backward".into()),
            }
        },
    );
    Ok(made?.remove(0))
}

/// Linear layers, of which one has a fault.
fn faulty(fault: Fault) -> LayerList {
    let mut list = LayerList::default();
    for place in 0..8 {
        list.push(LayerSpec::new(format!("fc{place}"), move |layer| {
            let (linear, calls) = (Linear::new(&layer.path(), 4, 4)?, AtomicUsize::new(0));
            Ok(layer_fn(move |xs, _| {
                let is_now = place == fault.layer && calls.fetch_add(1, Ordering::Relaxed) == fault.call;
                let wrong = if is_now { fault.wrong } else { Wrong::Nothing };
                match wrong {
                    Wrong::Nothing => Ok(vec![linear.apply(&xs[0])?]),
                    Wrong::Panic => {
                        failing();
                        panic!("a mistake in forward")
                    }
                    Wrong::Shape => {
                        failing();
                        Ok(vec![linear.apply(&xs[0].f_reshape([-1, 2])?)?])
                    }
                    Wrong::Kill => kill(),
                    in_backward => Ok(vec![through(&linear.apply(&xs[0])?, in_backward)?]),
                }
            }))
        }));
    }
    list
}

fn square(outputs: &[Tensor]) -> Result<Tensor, drumline_parallel::pipeline::LayerError> {
    Ok(outputs[0].f_square()?.f_sum(Kind::Float)?)
}

/// Steps of a model with a fault; the error and the time when it was returned.
fn faulty_steps(
    group: &ProcessGroup,
    fault: Fault,
    schedule: Schedule,
    steps: usize,
) -> Result<Option<(ParallelError, Instant)>> {
    let options = PipelineOptions { order: schedule.into(), micro_batches: 4, ..Default::default() };
    let pipeline = Pipeline::new(&faulty(fault), &mesh(group, group.size())?, options)?;
    let batch = |_| {
        let x = Tensor::ones([2, 4], (Kind::Float, Device::Cpu));
        drumline_parallel::pipeline::MicroBatch::new(vec![x.shallow_clone()], vec![x], 0)
    };
    let batches: Vec<_> = (0..4).map(batch).collect();
    for _ in 0..steps {
        let agreed = agreed(pipeline.engine().mesh(), &batches)?;
        if let Err(error) = pipeline.step(&agreed, &batches, Scale::No, |outputs, _| square(outputs)) {
            let at = Instant::now();
            let again =
                pipeline.step(&agreed, &batches, Scale::No, |outputs, _| square(outputs)).unwrap_err();
            assert!(again.to_string().contains("earlier error") || again.comm_error().is_some(), "{again}");
            return Ok(Some((error, at)));
        }
    }
    Ok(None)
}

/// A random number below `below`.
fn random(state: &mut u64, below: usize) -> usize {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*state >> 33) as usize % below
}

#[test]
fn random_failures_end_all_ranks_within_a_second() {
    let (runs, limit) = runs_and_limit("PIPELINE_FAULTS", 48);
    let mut state = 7;
    for run in 0..runs {
        let wrong = [Wrong::Panic, Wrong::Shape, Wrong::PanicInBackward, Wrong::ErrorInBackward][run % 4];
        let schedule = SCHEDULES[run / 4 % 4];
        let fault = Fault { wrong, layer: random(&mut state, 8), call: random(&mut state, 8) };
        let ranks = 2 + random(&mut state, 3);
        let ended = on_ranks(ranks, |group| faulty_steps(&group, fault, schedule, 2));
        let failed_at = FAILED_AT.lock().unwrap().take().unwrap();
        let what = format!("{fault:?}, {schedule}, {ranks} ranks");
        let mut failed = 0;
        for (rank, outcome) in ended.into_iter().enumerate() {
            let (error, at) = outcome.unwrap_or_else(|| panic!("rank {rank} did not end: {what}"));
            let (text, after) = (error.to_string(), at.saturating_duration_since(failed_at));
            assert!(after < limit, "{after:?}: {what}: {text}");
            let own = [format!("rank {rank} failed at "), format!("rank {rank} stopped at ")];
            assert!(own.iter().any(|own| text.starts_with(own)), "{what}: {text}");
            assert!(text.contains("failed at ") && text.contains("micro-batch"), "{what}: {text}");
            failed += usize::from(text.starts_with(&own[0]));
        }
        assert_eq!(failed, 1, "{what}");
    }
    // The control: without a fault nothing ends.
    let fault = Fault { wrong: Wrong::Nothing, layer: 0, call: 0 };
    let ended = on_ranks(3, |group| Ok(faulty_steps(&group, fault, Schedule::OneFOneB, 2)?.is_some()));
    assert_eq!(ended, [false; 3]);
}

/// A number of the environment.
fn number(name: &str) -> Option<u128> {
    std::env::var(name).ok().and_then(|value| value.parse().ok())
}

/// The number after these words in what a rank has said.
fn number_after(said: &str, words: &str) -> Option<u128> {
    said.split_once(words)?.1.split_once(" ms")?.0.parse().ok()
}

/// What the ranks of a job say of which one was killed: the time until the last of the others ended.
fn ended_within(report: &JobReport, what: &str) -> Result<Duration> {
    let killed = report.ranks.iter().position(|rank| rank.exit == Exit::Signal(6));
    let killed = killed.with_context(|| format!("no rank was killed: {what}: {report:?}"))?;
    let said: Vec<_> = report.ranks.iter().map(|rank| String::from_utf8_lossy(&rank.stdout)).collect();
    let at = number_after(&said[killed], "killed at ").context("a rank was killed without a word")?;
    let mut longest = 0;
    for (rank, said) in said.iter().enumerate().filter(|(rank, _)| *rank != killed) {
        let ended = number_after(said, "ended at ").with_context(|| format!("{rank}: {what}: {report:?}"))?;
        longest = longest.max(ended.saturating_sub(at));
        anyhow::ensure!(said.contains(&format!("rank {rank} stopped at ")), "{what}: {said}");
        anyhow::ensure!(said.contains("micro-batch"), "{what}: {said}");
        anyhow::ensure!(said.contains(&format!("rank {killed}")), "{what}: {said}");
    }
    Ok(Duration::from_millis(longest as u64))
}

ranks_test!(
    a_killed_stage_ends_all_others_within_a_second,
    3,
    {
        let group = ProcessGroup::from_env()?;
        let number = |name: &str| number(name).unwrap_or(0) as usize;
        let wrong = [Wrong::Nothing, Wrong::Kill, Wrong::KillInBackward][number("KILL")];
        let fault = Fault { wrong, layer: number("LAYER"), call: number("CALL") };
        match faulty_steps(&group, fault, SCHEDULES[number("SCHEDULE")], 3)? {
            Some((error, at)) => {
                println!("ended at {} ms: {error}", (since_1970() - at.elapsed()).as_millis())
            }
            None => println!("trained"),
        }
    },
    |ranks| {
        let (kills, limit) = runs_and_limit("PIPELINE_KILLS", 4);
        let (mut state, mut longest) = (11, Duration::ZERO);
        for kill in 0..kills {
            let fault = [1 + (kill + kill / 4) % 2, random(&mut state, 8), random(&mut state, 12), kill % 4];
            let what = format!("{fault:?} of KILL, LAYER, CALL, SCHEDULE");
            let names = ["KILL", "LAYER", "CALL", "SCHEDULE"];
            let killed = ranks.clone().env(names.into_iter().zip(fault.map(|value| value.to_string())));
            let within = ended_within(&killed.start()?.wait_all(Duration::from_secs(60))?, &what)?;
            anyhow::ensure!(within < limit, "{within:?}: {what}");
            longest = longest.max(within);
        }
        println!("{kills} kills: the other ranks ended within {longest:?}");
        let control = ranks.pass()?;
        assert!(control.ranks.iter().all(|rank| rank.exit == Exit::Code(0)));
        assert!(String::from_utf8_lossy(&control.ranks[0].stdout).contains("trained"));
    }
);

fn error_of(
    ranks: usize,
    pp: usize,
    layers: fn() -> LayerList,
    options: impl Fn() -> PipelineOptions + Sync,
) -> String {
    let all = on_ranks(ranks, |group| {
        let error = Pipeline::new(&layers(), &mesh(&group, pp)?, options()).unwrap_err();
        Ok(error.to_string())
    });
    assert!(all.iter().all(|error| *error == all[0]), "{all:?}");
    all[0].clone()
}

#[test]
fn bad_input_is_one_clear_error_on_all_ranks() {
    fn two_layers() -> LayerList {
        layers(Variant { blocks: 0, ..Variant::PLAIN })
    }
    let error = error_of(3, 3, two_layers, || options(Schedule::OneFOneB.into(), 4));
    assert_eq!(error, "2 layers cannot be cut into 3 stages of at least one; try 2 or fewer stages");

    let csv = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n";
    let program = Program::from_csv(csv).unwrap();
    let error = error_of(2, 2, two_layers, || options(Order::Program(program.clone()), 2));
    assert!(error.starts_with("the program cannot be carried out: ranks "), "{error}");
    assert!(error.contains("0SEND_F1") && error.contains("1SEND_B0"), "{error}");

    let program = Order::from(Schedule::GPipe).plan(2, 2).unwrap().program().clone();
    let error = error_of(4, 4, || layers(Variant::PLAIN), || options(Order::Program(program.clone()), 2));
    assert!(error.starts_with("the program is for 2 ranks, and the mesh has 4 along pp"), "{error}");

    let error = error_of(
        2,
        2,
        || layers(Variant::PLAIN),
        || PipelineOptions {
            order: Order::Schedule { schedule: Schedule::GPipe, chunks: 2 },
            ..Default::default()
        },
    );
    assert!(error.contains("the schedule gpipe has 1 stage a rank, not 2"), "{error}");

    let error =
        error_of(2, 2, two_layers, || PipelineOptions { costs: Some(vec![1.0]), ..Default::default() });
    assert_eq!(error, "the number of costs is 1; expected 2, one for each layer");

    let error = error_of(2, 2, two_layers, || PipelineOptions {
        devices: vec![tch::Device::Cpu; 3],
        ..Default::default()
    });
    assert!(error.starts_with("the number of devices is 3; expected 1 for all, or 2"), "{error}");
}

#[test]
fn ranks_with_different_programs_or_batches_get_an_error() {
    let all = on_ranks(2, |group| {
        let schedule = [Schedule::GPipe, Schedule::OneFOneB][group.rank()];
        let error = Pipeline::new(&layers(Variant::PLAIN), &mesh(&group, 2)?, options(schedule.into(), 4));
        Ok(error.unwrap_err().to_string())
    });
    assert_eq!(
        all,
        ["rank 1 has another program than rank 0; try the same schedule, layers and costs on all ranks"; 2]
    );
    let all = on_ranks(2, |group| {
        let pipeline =
            Pipeline::new(&layers(Variant::PLAIN), &mesh(&group, 2)?, options(Schedule::GPipe.into(), 4))?;
        Ok(step(&pipeline, &batches(3 + group.rank(), false, 0)).unwrap_err().to_string())
    });
    assert!(
        all.iter().all(|error| error.starts_with("rank 1 brings 4 micro-batches and rank 0 brings 3")),
        "{all:?}"
    );
}

#[test]
fn an_undeclared_tie_is_an_error() {
    on_ranks(1, |group| {
        let mut list = LayerList::default();
        list.push(LayerSpec::new("head", |layer| {
            let weight = layer.tied("wte.weight", |path, name| Ok(path.zeros(name, &[2, 2])))?;
            Ok(Box::new(Linear::of(weight)))
        }));
        let error = Pipeline::new(&list, &mesh(&group, 1)?, PipelineOptions::default()).unwrap_err();
        assert!(
            matches!(&error, ParallelError::Pipeline(error) if matches!(**error, PipelineError::Layer { .. }))
        );
        let expected = "layer `head`: `wte.weight` is not tied to `head`; try LayerList::tie with both";
        assert_eq!(error.to_string(), expected);
        Ok(())
    });
}
