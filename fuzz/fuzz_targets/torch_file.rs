//! Any bytes as a pickle, and as a file of `torch.save`. What is read can be walked through, and each tensor lies in its
//! storage.
#![no_main]

use std::io::Write;

use drumline_pickle::{Pickle, TorchFile, Value};
use libfuzzer_sys::fuzz_target;

/// How many objects are looked at: a pickle may contain itself.
const LOOKED_AT: usize = 10_000;

fuzz_target!(|bytes: &[u8]| {
    let Some((mode, rest)) = bytes.split_first() else { return };
    if mode % 4 == 0 {
        file(rest);
    } else if let Ok(pickle) = Pickle::read(rest.to_vec()) {
        walk(pickle.root(), |_| ());
    }
});

fn file(bytes: &[u8]) {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(bytes).unwrap();
    let Ok(file) = TorchFile::open(file.path()) else { return };
    walk(file.root(), |value| {
        let Some(tensor) = value.tensor() else { return };
        if let Ok(range) = file.bytes_of(tensor) {
            assert!(range.start <= range.end && range.end <= bytes.len() as u64);
            assert_eq!(range.end - range.start, tensor.span() * tensor.dtype.size());
        }
        let _ = file.check(tensor);
    });
}

fn walk<'a>(root: Value<'a>, mut look: impl FnMut(Value<'a>)) {
    let mut waiting = vec![root];
    for _ in 0..LOOKED_AT {
        let Some(value) = waiting.pop() else { return };
        look(value);
        let _ = (value.describe(), value.as_int(), value.as_float(), value.as_text(), value.get("module"));
        waiting.extend(value.items().into_iter().flatten());
        waiting.extend(value.entries().into_iter().flatten().flat_map(|(key, value)| [key, value]));
        waiting.extend(value.state());
        waiting.truncate(LOOKED_AT);
    }
}
