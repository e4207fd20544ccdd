//! An observer is called once for each bucket, in order, and for the wait at the end. It does not change gradients.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use anyhow::Result;
use drumline_comm::ProcessGroup;
use drumline_parallel::{Ddp, DdpOptions, ReducedBucket, ReductionObserver};
use drumline_torch::parameters;
use rank_test::ranks_test;
use tch::Device;
use tch::nn::VarStore;

use super::net::{Net, descend, loss, samples, values};

#[derive(Default)]
struct Heard {
    buckets: Mutex<Vec<ReducedBucket>>,
    waits: Mutex<Vec<(Instant, Instant)>>,
}

impl ReductionObserver for Heard {
    fn bucket_reduced(&self, bucket: ReducedBucket) {
        self.buckets.lock().unwrap().push(bucket);
    }

    fn waited(&self, begin: Instant, end: Instant) {
        self.waits.lock().unwrap().push((begin, end));
    }
}

/// Three steps; the parameters afterwards.
fn train(group: &ProcessGroup, observer: Option<Arc<dyn ReductionObserver>>) -> Result<Vec<tch::Tensor>> {
    let vs = VarStore::new(Device::Cpu);
    let options = DdpOptions { bucket_cap: 200, first_bucket: 64, observer, ..DdpOptions::default() };
    let ddp = Ddp::new(Net::new(&vs, 0), &vs, group, options)?;
    for step in 0..3 {
        let (x, y) = samples(step * 8..step * 8 + 8);
        ddp.backward(&loss(&ddp.forward(&x)?, &y))?;
        descend(&parameters(&vs))?;
    }
    Ok(values(&parameters(&vs)))
}

ranks_test!(an_observer_hears_of_each_bucket_and_changes_nothing, 2, {
    let group = ProcessGroup::from_env()?;
    let heard = Arc::new(Heard::default());
    let observed = train(&group, Some(heard.clone()))?;
    let alone = train(&group, None)?;
    assert!(observed.iter().zip(&alone).all(|(one, other)| one == other), "bit for bit");

    let (buckets, waits) = (heard.buckets.lock().unwrap(), heard.waits.lock().unwrap());
    assert_eq!(waits.len(), 3, "one wait for each backward");
    let firsts: Vec<usize> = (0..buckets.len()).filter(|at| buckets[*at].index == 0).collect();
    assert_eq!(firsts.len(), 3);
    for (step, from) in firsts.iter().enumerate() {
        let to = firsts.get(step + 1).copied().unwrap_or(buckets.len());
        let indices: Vec<usize> = buckets[*from..to].iter().map(|bucket| bucket.index).collect();
        assert!(indices.len() > 1 && indices == (0..indices.len()).collect::<Vec<_>>(), "{indices:?}");
        // The last bucket of a step is done before the wait is.
        assert!(buckets[to - 1].end <= waits[step].1 && waits[step].0 <= waits[step].1);
    }
    assert!(buckets.iter().all(|bucket| bucket.bytes > 0 && bucket.begin <= bucket.end));
    assert!(buckets.windows(2).all(|pair| pair[0].end <= pair[1].begin), "one after the other");
});
