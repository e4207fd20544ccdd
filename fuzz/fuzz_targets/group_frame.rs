//! Any bytes as what a rank sends over a link, after the handshake: headers, names of links, whole messages in pieces,
//! records without the key.
#![no_main]

use drumline_comm::fuzzing;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Some((mode, rest)) = bytes.split_first() else { return };
    match mode % 4 {
        0 => fuzzing::headers(rest),
        1 => fuzzing::link_name(rest),
        2 => fuzzing::messages(rest),
        _ => fuzzing::records(rest),
    }
});
