//! Streams, events and asynchronous copies.

use drumline_torch::cuda::{
    Event, Priority, Properties, Stream, Timing, can_access_peer, copy_async, device_count, keep_until,
    pinned, pinned_like, synchronize,
};
use tch::{Device, Kind, Tensor};

use super::shared::{FLOAT, GPU, gpu, long_work, values};

#[test]
fn a_gpu_has_properties() {
    let _turn = gpu();
    let found = Properties::of(0).unwrap();
    assert!(found.name.contains("NVIDIA") && found.capability.0 >= 7, "{found:?}");
    assert!(found.total_memory > 1 << 30 && found.multiprocessors > 0 && found.pci_bus_id.contains(':'));
    assert!(found.versions.0 >= 13_000 && found.versions.1 >= 13_000, "{found:?}");
    assert!(device_count().unwrap() >= 1 && !can_access_peer(0, 0).unwrap());
    assert!(Properties::of(99).is_err());
}

#[test]
fn a_stream_waits_for_an_event_of_another() {
    let _turn = gpu();
    let (here, there) = (Stream::current(0).unwrap(), Stream::new(0, Priority::High).unwrap());
    let done = Event::new(Timing::Off).unwrap();
    let product = long_work();
    done.record(here).unwrap();
    let seen = {
        let _scope = there.enter().unwrap();
        assert_eq!(Stream::current(0).unwrap(), there);
        there.wait_for(&done).unwrap();
        keep_until(&product, there).unwrap();
        product.sum(Kind::Float)
    };
    assert_eq!(Stream::current(0).unwrap(), here);
    there.synchronize().unwrap();
    assert!(done.is_done().unwrap() && there.is_done().unwrap());
    let expected = product.sum(Kind::Float).double_value(&[]);
    assert_eq!(seen.double_value(&[]), expected);
}

#[test]
fn events_measure_time() {
    let _turn = gpu();
    let stream = Stream::current(0).unwrap();
    let (from, to) = (Event::new(Timing::On).unwrap(), Event::new(Timing::On).unwrap());
    from.record(stream).unwrap();
    let _product = long_work();
    to.record(stream).unwrap();
    to.synchronize().unwrap();
    let took = from.milliseconds_to(&to).unwrap();
    assert!(took > 0.1 && took < 10_000.0, "{took}");
    assert!(!stream.raw().unwrap().is_null() || stream == Stream::current(0).unwrap());
}

#[test]
fn copies_of_pinned_memory_are_asynchronous() {
    let _turn = gpu();
    let host = pinned(&Tensor::arange(1 << 20, (Kind::Float, Device::Cpu))).unwrap();
    let mut there = Tensor::zeros([1 << 20], FLOAT);
    let product = long_work();
    let began = std::time::Instant::now();
    copy_async(&mut there, &host).unwrap();
    let issued = began.elapsed();
    synchronize(0).unwrap();
    assert!(issued < began.elapsed(), "the copy was waited for");
    let mut back = pinned_like(&there).unwrap();
    copy_async(&mut back, &there).unwrap();
    synchronize(0).unwrap();
    assert_eq!(values(&back), values(&host));
    assert_eq!(product.device(), GPU);
}
