//! The loader: order, determinism, errors and panics, threads that end.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use drumline::data::{
    Cause, Dataset, DistributedSampler, EvalSampler, ImageBatch, Loader, LoaderError, LoaderOptions,
    MapDataset, Sample, SampleError, SamplerOptions,
};
use tch::{Kind, Tensor};

/// Each sample: its index and something random.
type Drawn = Vec<(usize, u64)>;

fn draw(sample: Sample) -> Result<(usize, u64), Cause> {
    Ok((sample.index, sample.rng().next_u64()))
}

fn drawing(len: usize) -> impl Dataset<Batch = Drawn> + 'static {
    MapDataset::new(len, draw, Ok)
}

fn options(workers: usize, batch_size: usize) -> LoaderOptions {
    LoaderOptions { workers, batch_size, ..Default::default() }
}

fn shuffled(num_samples: usize, num_replicas: usize, rank: usize) -> DistributedSampler {
    let options = SamplerOptions { num_samples, num_replicas, rank, seed: 5, ..Default::default() };
    DistributedSampler::new(options).unwrap()
}

fn epoch(loader: &Loader<impl Dataset<Batch = Drawn> + 'static>, epoch: u64) -> Vec<Drawn> {
    loader.epoch(epoch).map(Result::unwrap).collect()
}

#[test]
fn batches_are_the_same_whatever_the_workers() {
    for len in [0, 1, 7, 64, 103] {
        let alone = Loader::new(drawing(len), shuffled(len, 1, 0), options(0, 8)).unwrap();
        let first = epoch(&alone, 0);
        assert_eq!(first.len(), alone.num_batches());
        assert!(first.iter().flatten().map(|(index, _)| *index).eq(shuffled(len, 1, 0).indices(0)));
        for workers in [1, 2, 3, 16] {
            let loader = Loader::new(drawing(len), shuffled(len, 1, 0), options(workers, 8)).unwrap();
            assert_eq!(epoch(&loader, 0), first, "{workers} workers, {len} samples");
            assert_eq!(epoch(&loader, 1), epoch(&alone, 1));
            assert!(len < 7 || epoch(&loader, 1) != first, "epochs differ");
        }
    }
}

#[test]
fn what_is_random_in_a_sample_does_not_depend_on_the_world() {
    let drawn = |world| {
        let mut all: Drawn = (0..world)
            .flat_map(|rank| {
                let loader = Loader::new(drawing(24), shuffled(24, world, rank), options(2, 5)).unwrap();
                epoch(&loader, 3).concat()
            })
            .collect();
        all.sort_unstable();
        all
    };
    assert_eq!(drawn(1), drawn(2));
    assert_eq!(drawn(1), drawn(4));
}

#[test]
fn the_last_batch_is_kept_or_dropped() {
    for (drop_last, sizes) in [(false, vec![4, 4, 2]), (true, vec![4, 4])] {
        let options = LoaderOptions { drop_last, ..options(2, 4) };
        let loader = Loader::new(drawing(10), EvalSampler::new(10, 1, 0).unwrap(), options).unwrap();
        let batches = loader.epoch(0);
        assert_eq!((batches.len(), loader.num_batches()), (sizes.len(), sizes.len()));
        assert_eq!(batches.map(|batch| batch.unwrap().len()).collect::<Vec<_>>(), sizes);
    }
}

#[test]
fn an_epoch_resumes_at_its_position_also_on_another_world() {
    let loader = |world, rank| Loader::new(drawing(50), shuffled(50, world, rank), options(2, 5)).unwrap();
    let whole = epoch(&loader(1, 0), 4);
    let mut begun = loader(1, 0).epoch(4);
    let mut seen: Vec<Drawn> = begun.by_ref().take(3).map(Result::unwrap).collect();
    let position = begun.sampler_position();
    assert_eq!((position.epoch, position.samples_seen, position.seed), (4, 15, 5));
    let same = loader(1, 0).resume(position).unwrap().map(Result::unwrap);
    assert_eq!(same.collect::<Vec<_>>(), whole[3..]);
    for rank in 0..5 {
        seen.extend(loader(5, rank).resume(position).unwrap().map(Result::unwrap));
    }
    let sorted = |batches: &[Drawn]| {
        let mut all = batches.concat();
        all.sort_unstable();
        all
    };
    assert_eq!(sorted(&seen), sorted(&whole));
    let other_seed = drumline::data::SamplerPosition { seed: 6, ..position };
    assert!(matches!(loader(1, 0).resume(other_seed), Err(LoaderError::Sampler(_))));
}

#[test]
fn without_workers_the_callers_thread_loads() {
    let thread = |workers| {
        let load = |_| Ok(std::thread::current().id());
        let dataset = MapDataset::new(4, load, Ok::<Vec<ThreadId>, Cause>);
        let loader = Loader::new(dataset, EvalSampler::new(4, 1, 0).unwrap(), options(workers, 4)).unwrap();
        loader.epoch(0).next().unwrap().unwrap()[0]
    };
    assert_eq!(thread(0), std::thread::current().id());
    assert_ne!(thread(1), std::thread::current().id());
}

#[test]
fn errors_and_panics_name_the_sample_and_end_the_epoch() {
    for workers in [0, 1, 3] {
        for panics in [false, true] {
            let load = move |sample: Sample| match sample.index {
                13 if panics => panic!("no such pixel"),
                13 => Err(Cause::from("the file is too short")),
                index => Ok(index),
            };
            let dataset = MapDataset::new(40, load, Ok::<_, Cause>).with_names(|i| format!("cat/{i}.jpeg"));
            let dataset = Arc::new(dataset);
            let sampler = EvalSampler::new(40, 1, 0).unwrap();
            let loader = Loader::shared(Arc::clone(&dataset), sampler, options(workers, 4)).unwrap();
            let mut batches = loader.epoch(0);
            let good: Vec<_> = batches.by_ref().take(3).map(Result::unwrap).collect();
            assert_eq!(good.concat(), (0..12).collect::<Vec<_>>());
            let message = batches.next().unwrap().unwrap_err().to_string();
            let expected = if panics {
                "panicked while loading sample 13 (cat/13.jpeg): no such pixel"
            } else {
                "cannot load sample 13 (cat/13.jpeg): the file is too short"
            };
            assert_eq!(message, expected);
            assert_eq!((batches.len(), batches.sampler_position().samples_seen), (0, 12));
            assert!(batches.next().is_none() && batches.next().is_none());
            assert_eq!(Arc::strong_count(&dataset), 2, "the threads ended with the error");
        }
    }
}

/// Fails on whole batches only, and gives up before it is asked to.
struct Crowded;

impl Dataset for Crowded {
    type Batch = ();

    fn len(&self) -> usize {
        8
    }

    fn batch(&self, samples: &[Sample]) -> Result<(), SampleError> {
        assert!(samples.len() < 4, "too many");
        Ok(())
    }

    fn batch_unless_stopped(&self, _: &[Sample], _: &AtomicBool) -> Result<Option<()>, SampleError> {
        Ok(None)
    }
}

#[test]
fn a_data_set_that_gives_up_unasked_is_asked_again() {
    for workers in [0, 2] {
        let loader = Loader::new(Crowded, EvalSampler::new(8, 1, 0).unwrap(), options(workers, 3)).unwrap();
        assert_eq!(loader.epoch(0).map(Result::unwrap).count(), 3);
    }
}

#[test]
fn a_panic_that_no_sample_alone_explains_is_reported_for_the_batch() {
    let loader = Loader::new(Crowded, EvalSampler::new(8, 1, 0).unwrap(), options(2, 4)).unwrap();
    let error = loader.epoch(0).next().unwrap().unwrap_err();
    let message = error.to_string();
    assert!(matches!(error, LoaderError::BatchPanicked { count: 4, first: 0, .. }), "{message}");
    assert!(message.ends_with("none of which fails alone: too many"), "{message}");
}

#[test]
fn dropped_in_mid_epoch_it_leaves_no_thread() {
    let begun = Arc::new(AtomicUsize::new(0));
    let load = {
        let begun = Arc::clone(&begun);
        move |sample: Sample| {
            begun.fetch_add(1, Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(5));
            Ok(sample.index)
        }
    };
    let dataset = Arc::new(MapDataset::new(100_000, load, Ok::<_, Cause>));
    let sampler = EvalSampler::new(100_000, 1, 0).unwrap();
    let loader = Loader::shared(Arc::clone(&dataset), sampler, options(4, 2)).unwrap();
    for taken in [0, 3] {
        let mut batches = loader.epoch(0);
        batches.by_ref().take(taken).for_each(|batch| assert!(batch.is_ok()));
        assert!(Arc::strong_count(&dataset) > 2, "the control: the epoch and its threads hold the data set");
        let begin = Instant::now();
        drop(batches);
        assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
        assert_eq!(Arc::strong_count(&dataset), 2, "no thread is left");
        let at_drop = begun.load(Ordering::SeqCst);
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(begun.load(Ordering::SeqCst), at_drop, "nothing is loaded after the drop");
    }
}

#[test]
fn a_long_batch_is_given_up_when_nobody_wants_it() {
    let (sample, batch) = (Duration::from_millis(10), Duration::from_secs(40));
    let load = move |which: Sample| {
        std::thread::sleep(sample);
        Ok(which.index)
    };
    let num_samples = (batch.as_millis() / sample.as_millis()) as usize;
    let dataset = MapDataset::new(num_samples, load, Ok::<_, Cause>);
    let sampler = EvalSampler::new(num_samples, 1, 0).unwrap();
    let loader = Loader::new(dataset, sampler, options(1, num_samples)).unwrap();
    let batches = loader.epoch(0);
    std::thread::sleep(Duration::from_millis(50));
    let begin = Instant::now();
    drop(batches);
    assert!(begin.elapsed() < batch / 4, "{:?}", begin.elapsed());
}

#[test]
fn workers_are_no_further_ahead_than_configured() {
    let begun = Arc::new((Mutex::new(0), Condvar::new()));
    let load = {
        let begun = Arc::clone(&begun);
        move |sample: Sample| {
            *begun.0.lock().unwrap() += 1;
            begun.1.notify_all();
            Ok(sample.index)
        }
    };
    let dataset = MapDataset::new(1000, load, Ok::<_, Cause>);
    let options = LoaderOptions { prefetch: 3, ..options(2, 1) };
    let loader = Loader::new(dataset, EvalSampler::new(1000, 1, 0).unwrap(), options).unwrap();
    let mut batches = loader.epoch(0);
    for taken in 0..10 {
        let limit = Duration::from_secs(30);
        let (count, wait) =
            begun.1.wait_timeout_while(begun.0.lock().unwrap(), limit, |n| *n < taken + 6).unwrap();
        assert!(!wait.timed_out(), "six batches ahead of {taken}, got {count}");
        drop(count);
        std::thread::sleep(Duration::from_millis(2));
        assert_eq!(*begun.0.lock().unwrap(), taken + 6);
        assert_eq!(batches.next().unwrap().unwrap(), [taken]);
    }
}

#[test]
fn wrong_options_are_errors() {
    let made = |options, len| {
        let loader = Loader::new(drawing(10), EvalSampler::new(len, 1, 0).unwrap(), options);
        loader.map(drop).unwrap_err().to_string()
    };
    assert!(made(options(2, 0), 10).contains("batch size is 0, expected at least 1; try"));
    assert!(made(LoaderOptions { prefetch: 0, ..options(2, 1) }, 10).contains("prefetch is 0"));
    assert!(made(options(2, 1), 11).contains("for 11 samples, but the data set has 10; try"));
}

#[test]
fn images_are_stacked_and_moved() {
    let load = |sample: Sample| {
        let image = Tensor::full([3, 2, 2], sample.index as i64, (Kind::Float, tch::Device::Cpu));
        Ok((sample.index, image, sample.index as i64 % 3))
    };
    let dataset = MapDataset::new(5, load, |items| Ok::<_, Cause>(ImageBatch::stack(items)?));
    let options = LoaderOptions { pin_memory: true, ..options(2, 2) };
    let loader = Loader::new(dataset, EvalSampler::new(5, 1, 0).unwrap(), options).unwrap();
    assert_eq!(loader.options().pin_memory, drumline_torch::cuda::is_open());
    let batches: Vec<_> = loader.epoch(0).map(Result::unwrap).collect();
    assert_eq!(batches[1].images.size(), [2, 3, 2, 2]);
    assert_eq!(batches[1].images.double_value(&[1, 2, 1, 1]), 3.0);
    let last = batches[2].to_device(tch::Device::Cpu).unwrap();
    assert_eq!((last.len(), last.is_empty(), last.indices), (1, false, vec![4]));
    assert_eq!(Vec::<i64>::try_from(&last.labels).unwrap(), [1]);
}
