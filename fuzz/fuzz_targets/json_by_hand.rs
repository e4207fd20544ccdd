//! Any text as a `ds_config.json`: nothing breaks, and what is shown of a text that was read is read as the same.
//!
//! The module is included alone, because its crate links libtorch.
#![no_main]

#[path = "../../crates/drumline/src/config/json/mod.rs"]
#[allow(dead_code)]
mod json;

use json::{MAX_BYTES, parse};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    match parse(text) {
        Ok(node) => {
            let shown = node.value.to_string();
            if shown.len() <= MAX_BYTES {
                assert_eq!(parse(&shown).unwrap().value.to_string(), shown);
            }
        }
        Err(error) => {
            let lines = text.lines().count().max(1);
            assert!(error.at.line <= lines + 1 && error.at.column >= 1, "{error}");
            assert!(!error.to_string().is_empty());
        }
    }
});
