//! Any bytes as what the launcher reads: error files of workers, orders of a leader, lists and settings from people. What
//! is accepted and can be written down again must then be read as the same.
#![no_main]

use drumline_launch::{
    NodeRange, Order, RdzvConf, StdOf, include_slots, parse_env_file, parse_hostfile, parse_signals, split_endpoint,
};
use drumline_rendezvous::error_file::ErrorFile;
use drumline_rendezvous::node_list;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Some((mode, rest)) = bytes.split_first() else { return };
    match mode % 3 {
        0 => error_file(rest),
        1 => order(rest),
        _ => {
            if let Ok(text) = std::str::from_utf8(rest) {
                texts(text);
            }
        }
    }
});

fn error_file(bytes: &[u8]) {
    if let Ok(read) = ErrorFile::parse(bytes) {
        let again = ErrorFile::parse(read.to_json().as_bytes()).unwrap();
        assert_eq!((again.message, again.callstack), (read.message, read.callstack));
    }
}

fn order(bytes: &[u8]) {
    if let Ok(order) = Order::read(bytes) {
        assert_eq!(Order::read(order.line().as_bytes()).unwrap(), order);
    }
}

fn texts(text: &str) {
    if let Ok(conf) = text.parse::<RdzvConf>() {
        assert!(conf.to_string().parse::<RdzvConf>().is_ok());
    }
    if let Ok(nodes) = text.parse::<NodeRange>() {
        assert_eq!(nodes.to_string().parse(), Ok(nodes));
    }
    if let Ok(streams) = text.parse::<StdOf>() {
        assert_eq!(streams.to_string().parse(), Ok(streams));
    }
    if let Ok(hosts) = parse_hostfile(text) {
        let _ = include_slots(&hosts, text);
    }
    let _ = (parse_env_file(text), parse_signals(text), split_endpoint(text, Some(1)), node_list::expand(text));
}
